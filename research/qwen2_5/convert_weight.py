"""Hugging Face <-> MindSpore weights: `mindrlhf convert` under the path of MindFormers' script for Qwen2.5.

python research/qwen2_5/convert_weight.py --torch_ckpt_dir Qwen2.5-7B --mindspore_ckpt_path qwen2_5_7b.ckpt
"""

import sys

from mindrlhf.cli import run

if __name__ == "__main__":
    run("convert", *sys.argv[1:])
