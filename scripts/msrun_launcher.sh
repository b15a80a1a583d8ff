#!/usr/bin/env bash
# Starts a Python script under msrun, with the arguments of MindFormers' launcher:
#
#   bash scripts/msrun_launcher.sh "tools/run_qwen2_5.py --config F --run_mode finetune --train_data D" \
#       [WORKERS [MASTER_PORT LOG_DIR JOIN TIMEOUT]]
#   bash scripts/msrun_launcher.sh "SCRIPT ..." WORKERS LOCAL_WORKERS MASTER_ADDR MASTER_PORT NODE_RANK LOG_DIR JOIN TIMEOUT
set -euo pipefail

workers=${2:-8} address=127.0.0.1 port=8118 rank=0 log=output/msrun_log join=False timeout=7200
local=$workers
case $# in
    1 | 2) ;;
    6) port=$3 log=$4 join=$5 timeout=$6 ;;
    9) local=$3 address=$4 port=$5 rank=$6 log=$7 join=$8 timeout=$9 ;;
    *)
        sed -n 's/^# \{0,1\}//p' "$0" | sed 1d >&2
        exit 2
        ;;
esac

read -ra words <<<"$1"
exec msrun --worker_num="$workers" --local_worker_num="$local" --master_addr="$address" --master_port="$port" \
    --node_rank="$rank" --log_dir="$log" --join="$join" --cluster_time_out="$timeout" "${words[@]}"
