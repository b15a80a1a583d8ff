"""Folders that a stranger has filled: their size, and their removal."""

import os
from contextlib import suppress
from itertools import count


def exceeds(folder: str, most_bytes: int, most_files: int) -> bool:
    """Test that a folder takes more room or has more entries.

    Also true for a folder with parts that cannot be read.
    """
    waiting = [folder]
    size = 0
    files = 0
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    size += 512 * entry.stat(follow_symlinks=False).st_blocks
                    files += 1
                    if size > most_bytes or files > most_files:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError:
            return True
    return False


def remove_tree(folder: str) -> None:
    """Remove a folder of any depth, whatever rights its parts have.

    What cannot be removed stays. Each inner folder is first moved next to the outermost one, so that no path becomes
    too long.
    """
    numbers = count()
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        with suppress(OSError):
            os.chmod(place, 0o700)
            with os.scandir(place) as entries:
                found = list(entries)
            for entry in found:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        with suppress(OSError):
                            os.rmdir(entry.path)
                            continue
                        os.chmod(entry.path, 0o700)
                        moved = f"{folder}.{next(numbers)}"
                        os.rename(entry.path, moved)
                        waiting.append(moved)
                    else:
                        os.unlink(entry.path)
            os.rmdir(place)
