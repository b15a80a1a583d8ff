"""Entry of `python -m mindrlhf`, the `mindrlhf` command."""

from mindrlhf.cli import run

run()
