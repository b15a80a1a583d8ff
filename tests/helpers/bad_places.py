"""Places that cannot be written: beyond a size limit, without permission."""

import os
import resource
from contextlib import contextmanager


@contextmanager
def file_size_limit(nbytes):
    """Writing beyond `nbytes` fails with EFBIG (Python ignores the signal)."""
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, earlier[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)


@contextmanager
def ordinary_user():
    """Not root, whom permissions do not stop."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
