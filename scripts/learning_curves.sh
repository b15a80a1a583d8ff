#!/usr/bin/env bash
# Seven algorithms raise the held-out accuracy of a small warm-started model, on two tasks: one figure of all curves.
#
#   bash scripts/learning_curves.sh [--tasks NAMES] [--presets NAMES] [--seed N] [--steps N] [--warm_steps N] [--out DIR]
#
# --tasks       of "arithmetic countdown" (default both)
# --presets     of mindrlhf/configs/presets (default "grpo dr_grpo dapo gspo rloo reinforce_plus_plus ppo")
# --seed        of the problems, the first weights and everything drawn (default 0)
# --steps       of each run (default 16 for arithmetic, 40 for countdown)
# --warm_steps  of each warm start (default 200 for arithmetic, 400 for countdown)
# --out         folder of all that is written (default out/learning_curves in the project's folder)
#
# Each task gets its problems, a tokenizer, and a warm start that imitates careless demonstrations; each preset then
# trains a copy of it. What is finished is not done again, and a run that Ctrl-C or SIGTERM stopped goes on where it was.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
source "$root/scripts/small_tasks.sh"
tasks="arithmetic countdown" presets="grpo dr_grpo dapo gspo rloo reinforce_plus_plus ppo"
seed=0 steps="" warm_steps="" out=out/learning_curves
refuse() {
    echo "learning_curves.sh: $1; give --tasks NAMES, --presets NAMES, --seed N, --steps N, --warm_steps N or --out DIR" >&2
    exit 2
}
while (($#)); do
    case "$1=${2-}" in
        --tasks=?*) tasks=$2 ;;
        --presets=?*) presets=$2 ;;
        --seed=[0-9]*) seed=$2 ;;
        --steps=[1-9]*) steps=$2 ;;
        --warm_steps=[1-9]*) warm_steps=$2 ;;
        --out=?*) out=$(realpath -m "$2") ;;
        *) refuse "$1 ${2-} is not understood" ;;
    esac
    shift 2
done
[[ $seed$steps$warm_steps =~ ^[0-9]+$ ]] || refuse "--seed, --steps and --warm_steps are whole numbers"
check_tasks $tasks
for name in $presets; do
    [[ -f $root/mindrlhf/configs/presets/$name.yaml ]] || refuse "there is no preset $name"
done

# Of every run: what is not here is as published, in mindrlhf/configs/presets/NAME.yaml. Two updates a step, so that
# ratios differ from 1 and what clips them matters.
common=(
    data.prompts_per_step=16 rollout.num_generations=8 rollout.max_new_tokens=32 rollout.max_slots=128
    algorithm.updates_per_iteration=2 optimizer.lr=2e-4 optimizer.warmup_steps=5
    train.length_bucket=32 trainer.test_freq=4
)
# Of a preset, or of one on a task: a critic needs a rate that its small model learns with, and its prompts have one
# answer each; Dr. GRPO on countdown fell back from its best at the rate of the others.
declare -A own=(
    [countdown/dr_grpo]="optimizer.lr=1e-4"
    [dapo]="dynamic_sampling.max_rounds=3"
    [ppo]="data.prompts_per_step=128 rollout.num_generations=1 critic.optimizer.lr=1e-3 algorithm.updates_per_iteration=4"
)
declare -A training=([arithmetic]=16 [countdown]=40) # steps of a task's runs

open_project "$out"
for task in $tasks; do
    folder=$out/$task
    prepare "$task" "$seed" "$folder" 200 "$warm_steps"
    for preset in $presets; do
        run=$folder/$preset
        [[ -f $run/hf/config.json ]] && continue
        step "$task: $preset"
        read -ra options <<<"${own[$preset]-} ${own[$task/$preset]-}"
        mindrlhf train --grpo_config "preset:$preset" \
            --sft_path_infer "$models/predict_qwen2_tiny.yaml" --sft_path_train "$models/finetune_qwen2_tiny.yaml" \
            --load_sft_checkpoint_infer "$folder/warm_start/hf" --mind_dataset_dir "$folder/data/train.mindrecord" \
            --save_ckpt_dir "$run" --output_dir "$run" seed="$seed" data.val_dataset="$folder/data/test.mindrecord" \
            "reward.functions=[{name: ${reward[$task]}}]" \
            trainer.resume_mode=auto trainer.total_steps="${steps:-${training[$task]}}" \
            "${common[@]}" "${options[@]}"
    done
done

step "Held-out accuracy, greedy, before and after"
for task in $tasks; do
    for preset in $presets; do
        printf '%-12s %-22s %s\n' "$task" "$preset" "$(sed -n "s|.*\"val-core/$task/acc/mean@1\": *\([0-9.]*\).*|\1|p" \
            "$out/$task/$preset/metrics.jsonl" | sed -n '1p;$p' | paste -sd' ')"
    done
done | tee "$out/accuracy.txt"
panels=()
for task in $tasks; do
    panels+=(--panel "${task^}")
    for preset in $presets; do panels+=("$out/$task/$preset"); done
done
mindrlhf plot --metric "val-core/*/acc/mean@1" "${panels[@]}" --title "Held-out accuracy by step" \
    --output "$out/learning_curves.png"
