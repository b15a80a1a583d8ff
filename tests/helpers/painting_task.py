"""A practice task whose environment paints: it answers each turn with a picture."""

from pathlib import Path

from seeing_task import SeeingTask, make_seeing_task

ENVIRONMENT = '''
from PIL import Image

COLOURS = {"red": (220, 30, 40), "green": (20, 200, 60), "blue": (30, 50, 230)}


class Painter:
    """Shows a colour for each turn, by its length; rows of green begin with one."""

    def reset(self, ground_truth: str) -> object:
        self.turns = []
        return ["Look:", Image.new("RGB", (16, 8), COLOURS["red"])] if ground_truth == "green" else None

    def reply(self, text: str) -> object:
        self.turns.append(text)
        if len(self.turns) == 3:
            return None
        return ["So", Image.new("RGB", (8, 8), list(COLOURS.values())[len(text) % 3]), "it is."]

    def get_reward(self) -> float:
        return len(self.turns) + len(set("".join(self.turns))) / 100
'''
# The reward looks at the pictures that a conversation has.
REWARD = """
def pictures(prompt, completion, fields):
    return fields.get("conversation", "").count("<image>") + len(set(completion)) / 10
"""


def make_painting_task(folder: Path, depth: int = 1, layers: int = 1) -> SeeingTask:
    """A `SeeingTask` with the environment `painter.py:Painter` and the reward `reward.py:pictures`."""
    task = make_seeing_task(folder, depth=depth, layers=layers)
    (folder / "painter.py").write_text(ENVIRONMENT)
    (folder / "reward.py").write_text(REWARD)
    return task
