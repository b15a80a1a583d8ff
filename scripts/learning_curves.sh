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
example=examples/qwen_grpo_tutorial
models=model_configs/qwen_grpo
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
for name in $tasks; do [[ $name == arithmetic || $name == countdown ]] || refuse "there is no task $name here"; done
for name in $presets; do
    [[ -f $root/mindrlhf/configs/presets/$name.yaml ]] || refuse "there is no preset $name"
done

title="the start"
trap 'echo "learning_curves.sh: stopped at: $title" >&2' ERR
step() {
    title=$1
    printf '\n[%d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$title"
}

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
# Of a task: its problems, the steps of its warm start and of its runs, and what is right.
declare -A problems=(
    [arithmetic]="--max_number 10 --careless_share 0.75"
    [countdown]="--operands 2 --max_number 80 --careless_share 0.6"
)
declare -A warming=([arithmetic]=200 [countdown]=400)
declare -A training=([arithmetic]=16 [countdown]=40)
declare -A reward=([arithmetic]=gsm8k [countdown]=countdown)

cd "$root"
mkdir -p "$out" || exit 2
if ! command -v mindrlhf >/dev/null; then
    step "Environment: .venv"
    bash scripts/setup.sh
    export PATH="$root/.venv/bin:$PATH"
fi
export GLOG_v="${GLOG_v:-3}" # 3: errors only

for task in $tasks; do
    folder=$out/$task data=$out/$task/data warm=$out/$task/warm_start
    tokenizer=(--vocab_path "$data/vocab.json" --merges_file_path "$data/merges.txt")
    if [[ ! -f $warm/hf/config.json ]]; then
        step "$task: problems, tokenizer and MindRecord files"
        read -ra options <<<"${problems[$task]}"
        mindrlhf synthesize --task "$task" "${options[@]}" --train_size 4000 --test_size 200 \
            --tokenizer_vocab_size 512 --seed "$seed" --output_dir "$data"
        for split in demonstrations train test; do
            mindrlhf data "${tokenizer[@]}" --dataset_type "$task" --template plain \
                --file_path "$data/$split.jsonl" --output_path "$data/$split.mindrecord"
        done
        step "$task: warm start on careless demonstrations"
        mindrlhf sft "${tokenizer[@]}" --sft_path_train "$models/finetune_qwen2_tiny.yaml" \
            --sft_config "$example/quickstart_sft.yaml" --mind_dataset_dir "$data/demonstrations.mindrecord" \
            --save_ckpt_dir "$warm" --output_dir "$warm" seed="$seed" \
            trainer.total_steps="${warm_steps:-${warming[$task]}}"
    fi
    for preset in $presets; do
        run=$folder/$preset
        [[ -f $run/hf/config.json ]] && continue
        step "$task: $preset"
        read -ra options <<<"${own[$preset]-} ${own[$task/$preset]-}"
        mindrlhf train --grpo_config "preset:$preset" \
            --sft_path_infer "$models/predict_qwen2_tiny.yaml" --sft_path_train "$models/finetune_qwen2_tiny.yaml" \
            --load_sft_checkpoint_infer "$warm/hf" --mind_dataset_dir "$data/train.mindrecord" \
            --save_ckpt_dir "$run" --output_dir "$run" seed="$seed" data.val_dataset="$data/test.mindrecord" \
            "reward.functions=[{name: ${reward[$task]}}]" \
            trainer.resume_mode=auto trainer.total_steps="${steps:-${training[$task]}}" \
            "${common[@]}" "${options[@]}"
    done
done

step "Held-out accuracy, greedy, before and after"
for task in $tasks; do
    for preset in $presets; do
        printf '%-12s %-22s %s\n' "$task" "$preset" "$(sed -n "s|.*\"val-core/$task/acc/mean@1\": \([0-9.]*\).*|\1|p" \
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
