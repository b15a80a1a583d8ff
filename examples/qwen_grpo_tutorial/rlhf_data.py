"""GSM8K and similar data to MindRecord: `mindrlhf data` under the name of MindRLHF's script.

python rlhf_data.py --vocab_path vocab.json --merges_file_path merges.txt \
    --file_path train.jsonl --output_path gsm8k.mindrecord
"""

import sys

from mindrlhf.cli import run

if __name__ == "__main__":
    run("data", *sys.argv[1:])
