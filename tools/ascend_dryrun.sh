#!/usr/bin/env bash
# Compiles the graphs of a GRPO job for each of its ranks, without a card: MindSpore simulates Ascend in a container with
# CANN, and reports the peak of its memory. Not run with CANN.
#
#   bash tools/ascend_dryrun.sh [TRAIN_YAML INFER_YAML] [--ranks N] [FLAGS of mindrlhf dry-run] [key=value...]
#
# Without YAMLs it is the 7B pair. N (8) is the number of ranks that the YAMLs ask for. `--device CPU` compiles for CPUs,
# without simulation and without a peak. Variables: AT_ONCE (1), ranks at the same time, each of which takes as much
# memory of the host as its weights, gradients and moments; OUT (out/ascend_dryrun), the folder of rank_0.out, graphs
# with their seconds, and of rank_0.log, MindSpore's log; MS_SIMULATION_LEVEL (1), MindSpore's own: 0 counts no memory.
# Exit codes: 0, 1 if a rank failed, 2 for a mistake, or without CANN.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
models=$root/model_configs/qwen_grpo
yamls=("$models/finetune_qwen2_5_7b.yaml" "$models/predict_qwen2_5_7b_instruct.yaml")
if [[ ${1:--} != -* && $1 != *=* ]]; then
    if [[ ${2:--} == -* || $2 == *=* ]]; then
        echo "ascend_dryrun.sh: $1 is one YAML; give one of training and one of generation, or none" >&2
        exit 2
    fi
    yamls=("$1" "$2")
    shift 2
fi
ranks=8
device=Ascend
words=()
while (($#)); do
    case $1 in
        --ranks | --device)
            declare "${1#--}=${2:-}"
            shift $(($# > 1 ? 2 : 1))
            continue
            ;;
        --ranks=* | --device=*) declare "${1#--}" ;;
        *) words+=("$1") ;;
    esac
    shift
done
if [[ ! $ranks =~ ^[1-9][0-9]*$ ]]; then
    echo "ascend_dryrun.sh: --ranks is '$ranks'; give the number of ranks that the YAMLs ask for" >&2
    exit 2
fi

command -v mindrlhf >/dev/null || export PATH="$root/.venv/bin:$PATH"
if [[ $device == CPU ]]; then
    export GLOG_v="${GLOG_v:-3}" # 3: errors only
else
    export GLOG_v="${GLOG_v:-1}" # 1: the peaks, too
    # CANN's stand-in for the driver's library, behind the driver's own: a container without a card has no driver.
    stand_in=${ASCEND_HOME_PATH:-/usr/local/Ascend/ascend-toolkit/latest}/$(uname -m)-linux/devlib
    export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$stand_in"
fi
out=${OUT:-out/ascend_dryrun}
mkdir -p "$out"
rm -f "$out"/rank_*.out "$out"/rank_*.log

# Compiles one rank's graphs.
compile() {
    local rank=$1
    shift
    echo "rank $rank"
    "$@" --rank "$rank" >"$out/rank_$rank.out" 2>"$out/rank_$rank.log"
}
export out
export -f compile
entry=(python -m mindrlhf dry-run --sft_path_train "${yamls[0]}" --sft_path_infer "${yamls[1]}" --device "$device")
entry+=(--ranks "$ranks" ${words[@]+"${words[@]}"})
code=0
compile 0 "${entry[@]}" || code=$?
if ((code == 2)); then # a mistake, which all ranks would repeat
    grep '^mindrlhf dry-run: ' "$out/rank_0.log" >&2 || cat "$out/rank_0.log" >&2
    exit 2
fi
if ((ranks > 1)); then
    seq 1 $((ranks - 1)) | xargs -P "${AT_ONCE:-1}" -I@RANK@ bash -c 'compile "$@" || true' compile @RANK@ "${entry[@]}"
fi
exec python -m mindrlhf.memory.simulated "$out" "$ranks"
