"""Hugging Face <-> MindSpore weights: `mindrlhf convert` under the name of MindFormers' script.

python convert_weight.py --torch_ckpt_dir Qwen2.5-7B --mindspore_ckpt_path qwen2_5_7b.ckpt --dtype bf16
python convert_weight.py --reverse --mindspore_ckpt_path qwen2_5_7b.ckpt --torch_ckpt_dir out --config_path model.yaml
"""

import sys

from mindrlhf.cli import run

if __name__ == "__main__":
    run("convert", *sys.argv[1:])
