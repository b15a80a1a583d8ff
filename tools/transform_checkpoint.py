"""Weights from any layout to any other: `mindrlhf transform` under the name of MindFormers' script.

python transform_checkpoint.py --src_checkpoint Qwen2.5-7B --dst_checkpoint out --dst_strategy finetune_qwen2_5_7b.yaml
python transform_checkpoint.py --src_checkpoint ckpt/train --src_strategy train.yaml --dst_checkpoint Qwen2.5-7B-grpo
"""

import sys

from mindrlhf.cli import run

if __name__ == "__main__":
    run("transform", *sys.argv[1:])
