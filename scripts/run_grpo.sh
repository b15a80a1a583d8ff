#!/usr/bin/env bash
# Starts GRPO under msrun: 8 workers with the layouts of the 7B YAMLs, or what the variables and flags say.
#
#   bash scripts/run_grpo.sh [--dry-run] [FLAGS of grpo_one_stage.py] [key=value...]
#
# --dry-run prints the command and starts nothing.
# Needed are the model and the prompts: --load_sft_checkpoint_infer DIR --mind_dataset_dir FILE. Any flag that is given
# goes before the one below. Variables, with msrun's meaning: WORKER_NUM (8), LOCAL_WORKER_NUM (as WORKER_NUM),
# MASTER_ADDR (127.0.0.1), MASTER_PORT (9190), NODE_RANK (0), LOG_DIR (qwen2_5_one_log), JOIN (True).
#
# On a CPU with the quick start's model, after `bash scripts/quickstart.sh`:
#
#   WORKER_NUM=1 bash scripts/run_grpo.sh --sft_path_infer model_configs/qwen_grpo/predict_qwen2_tiny.yaml \
#       --sft_path_train model_configs/qwen_grpo/finetune_qwen2_tiny.yaml \
#       --load_sft_checkpoint_infer out/quickstart/sft/hf --mind_dataset_dir out/quickstart/data/train.mindrecord \
#       --save_ckpt_dir out/run_grpo/ckpt
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
models=$root/model_configs/qwen_grpo
workers=${WORKER_NUM:-8}

start=(exec)
if [[ ${1:-} == --dry-run ]]; then
    start=(printf '%q ')
    trap echo EXIT # ends the line
    shift
elif ! command -v msrun >/dev/null; then
    bash "$root/scripts/setup.sh"
    export PATH="$root/.venv/bin:$PATH"
fi
export GLOG_v="${GLOG_v:-3}" # 3: errors only

"${start[@]}" msrun --worker_num="$workers" --local_worker_num="${LOCAL_WORKER_NUM:-$workers}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${MASTER_PORT:-9190}" --node_rank="${NODE_RANK:-0}" \
    --join="${JOIN:-True}" --log_dir="${LOG_DIR:-qwen2_5_one_log}" \
    "$root/examples/qwen_grpo_tutorial/grpo_one_stage.py" \
    --sft_path_infer "$models/predict_qwen2_5_7b_instruct.yaml" --sft_path_train "$models/finetune_qwen2_5_7b.yaml" \
    --save_ckpt_dir out/run_grpo/ckpt --use_parallel True "$@"
