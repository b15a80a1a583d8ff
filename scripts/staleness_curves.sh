#!/usr/bin/env bash
# The quick start with answers of older weights: held-out accuracy by step, mean and spread of its seeds, in one figure.
#
#   bash scripts/staleness_curves.sh [--seeds NUMBERS] [--steps N] [--variants NAMES] [--out DIR]
#
# --seeds     of the problems, the first weights and everything drawn (default "0 1 2")
# --steps     of GRPO (default: trainer.total_steps of quickstart_grpo.yaml)
# --variants  of those below (default all)
# --out       folder of all that is written (default out/staleness_curves in the project's folder)
#
# Each seed runs scripts/quickstart.sh once, with few steps: for its problems and warm start. What is finished is not done
# again, and a run that Ctrl-C or SIGTERM stopped goes on where it was.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
source "$root/scripts/steps.sh"
example=examples/qwen_grpo_tutorial models=model_configs/qwen_grpo
# About as many tokens as a batch of 256 answers has: what Q of `tokens_per_step` is best.
declare -A options=(
    [synchronous]="trainer.staleness=0"
    [one_behind]="trainer.staleness=1"
    [one_behind_uncorrected]="trainer.staleness=1 rollout_correction.level=null"
    [four_behind]="trainer.staleness=4"
    [four_behind_uncorrected]="trainer.staleness=4 rollout_correction.level=null"
    [in_parts]="trainer.staleness=1 rollout.tokens_per_step=3000"
)
variants="synchronous one_behind one_behind_uncorrected four_behind four_behind_uncorrected in_parts"
seeds="0 1 2" steps="" out=out/staleness_curves
refuse() {
    echo "staleness_curves.sh: $1; give --seeds NUMBERS, --steps N, --variants NAMES or --out DIR" >&2
    exit 2
}
while (($#)); do
    case "$1=${2-}" in
        --seeds=[0-9]*) seeds=$2 ;;
        --steps=[1-9]*) steps=$2 ;;
        --variants=?*) variants=$2 ;;
        --out=?*) out=$(realpath -m "$2") ;;
        *) refuse "$1 ${2-} is not understood" ;;
    esac
    shift 2
done
[[ "$seeds $steps" =~ ^[0-9\ ]+$ ]] || refuse "--seeds and --steps are whole numbers"
for name in $variants; do
    [[ -n ${options[$name]-} ]] || refuse "there is no variant $name"
done

cd "$root"
mkdir -p "$out" || exit 2
bash scripts/setup.sh
export PATH="$root/.venv/bin:$PATH" GLOG_v="${GLOG_v:-3}" # 3: errors only
for seed in $seeds; do
    first=$out/first$seed
    if [[ ! -f $first/sft/hf/config.json ]]; then
        step "Seed $seed: problems and warm start"
        bash scripts/quickstart.sh --seed "$seed" --out "$first" --steps 2
    fi
    for name in $variants; do
        run=$out/${name}_seed$seed
        [[ -f $run/hf/config.json ]] && continue
        step "Seed $seed: $name"
        mindrlhf train --grpo_config "$example/quickstart_grpo.yaml" \
            --vocab_path "$first/data/vocab.json" --merges_file_path "$first/data/merges.txt" \
            --sft_path_infer "$models/predict_qwen2_tiny.yaml" --sft_path_train "$models/finetune_qwen2_tiny.yaml" \
            --load_sft_checkpoint_infer "$first/sft/hf" --mind_dataset_dir "$first/data/train.mindrecord" \
            --save_ckpt_dir "$run" --output_dir "$run" seed="$seed" data.val_dataset="$first/data/test.mindrecord" \
            trainer.test_freq=5 trainer.resume_mode=auto ${steps:+trainer.total_steps="$steps"} ${options[$name]}
    done
done

step "Held-out accuracy, greedy, after the last step"
for name in $variants; do
    line=$(printf '%-24s' "$name")
    for seed in $seeds; do
        line+=" $(sed -n 's|.*"val-core/[a-z_]*/acc/mean@1": *\([0-9.]*\).*|\1|p' "$out/${name}_seed$seed/metrics.jsonl" | tail -1)"
    done
    echo "$line"
done | tee "$out/accuracy.txt"
runs=()
for name in $variants; do for seed in $seeds; do runs+=("$out/${name}_seed$seed"); done; done
mindrlhf plot --by_seed --metric "val-core/*/acc/mean@1" "${runs[@]}" --smoothing 0 \
    --title "Held-out accuracy by step" --output "$out/staleness_curves.png"
