"""GRPO in one stage, started by msrun (or alone): the same as `mindrlhf train`."""

import sys

from mindrlhf.cli import run

if __name__ == "__main__":
    run("train", *sys.argv[1:])
