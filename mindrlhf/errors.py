"""The one exception for mistakes that the user can correct."""

from mindrlhf.files.printable import printable, shortened

MOST_CHARACTERS = 1200  # of a message, quoted text included


class UserError(Exception):
    """Mistake in the user's settings, files or folders.

    The message is one sentence: the mistake, its place (file, key, line), and a right value.
    The command line prints it without a traceback and exits with code 2. It may quote names and values of unknown
    origin, so its text becomes one line of readable length without control characters.
    """

    def __str__(self) -> str:
        return shortened(printable(super().__str__()), MOST_CHARACTERS, " ")
