"""Tool and environment for `conversations.py`, which sleep as long as a search would take."""

import time


def look_up(seconds: float) -> str:
    """Find out something.

    Args:
        seconds: How long that takes.
    """
    time.sleep(seconds)
    return "The answer is 42."


class Library:
    """Environment whose tool is `look_up`."""

    def look_up(self, seconds: float) -> str:
        """Find out something.

        Args:
            seconds: How long that takes.
        """
        return look_up(seconds)

    def get_reward(self) -> float:
        return 1.0
