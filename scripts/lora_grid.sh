#!/usr/bin/env bash
# Full training against adapters of several ranks, at three learning rates and three seeds each: one table of accuracies.
#
#   bash scripts/lora_grid.sh [--tasks NAMES] [--ranks NUMBERS] [--factors NUMBERS] [--seeds NUMBERS] [--steps N]
#                             [--warm_steps N] [--out DIR]
#
# --tasks       of "arithmetic countdown" (default both): the quick start's problems, and those of the learning curves
# --ranks       of the adapters; 0 is full training (default "0 1 8 32")
# --factors     the rates are these times 2e-4, the quick start's; for adapters ten times that (default "0.3 1 3")
# --seeds       of the problems, the first weights and everything drawn (default "0 1 2")
# --steps       of each run (default 60 for arithmetic, 40 for countdown)
# --warm_steps  of each warm start (default 200 for arithmetic, 400 for countdown)
# --out         folder of all that is written (default out/lora_grid in the project's folder)
#
# Each task and seed gets its problems, a tokenizer and a warm start that imitates careless demonstrations; each run then
# trains a copy of it. What is finished is not done again, and a run that Ctrl-C or SIGTERM stopped goes on where it was.
# The table has what is finished, and is also in DIR/table.txt; DIR/lora_grid.png is its figure.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
source "$root/scripts/small_tasks.sh"
tasks="arithmetic countdown" ranks="0 1 8 32" factors="0.3 1 3" seeds="0 1 2" steps="" warm_steps="" out=out/lora_grid
refuse() {
    echo "lora_grid.sh: $1; give --tasks NAMES, --ranks NUMBERS, --factors NUMBERS, --seeds NUMBERS, --steps N," \
        "--warm_steps N or --out DIR" >&2
    exit 2
}
while (($#)); do
    case "$1=${2-}" in
        --tasks=?*) tasks=$2 ;;
        --ranks=[0-9]*) ranks=$2 ;;
        --factors=[0-9]*) factors=$2 ;;
        --seeds=[0-9]*) seeds=$2 ;;
        --steps=[1-9]*) steps=$2 ;;
        --warm_steps=[1-9]*) warm_steps=$2 ;;
        --out=?*) out=$(realpath -m "$2") ;;
        *) refuse "$1 ${2-} is not understood" ;;
    esac
    shift 2
done
check_tasks $tasks
[[ $ranks$seeds$steps$warm_steps =~ ^[0-9\ ]+$ ]] || refuse "--ranks, --seeds and the steps are whole numbers"
[[ $factors =~ ^[0-9.\ ]+$ ]] || refuse "--factors are numbers"

# Of every run, on arithmetic as in the quick start.
common=(
    data.prompts_per_step=32 rollout.num_generations=8 rollout.max_new_tokens=32 rollout.max_slots=256
    algorithm.beta=0 optimizer.warmup_steps=5 train.length_bucket=16 trainer.save_freq=20 trainer.save_max_ckpt_num=1
)
declare -A training=([arithmetic]=60 [countdown]=40) # steps of a task's runs
declare -A held_out=([arithmetic]=400 [countdown]=200) # problems

open_project "$out"

# run_name RANK FACTOR: folder of a run below that of its task and seed.
run_name() { if [[ $1 == 0 ]]; then echo "full_x$2"; else echo "rank$1_x$2"; fi; }

# evaluate MODEL FILE: greedy accuracy on the held-out problems, kept in FILE.
evaluate() {
    mindrlhf eval --model "$1" --data "$folder/data/test.mindrecord" --max_new_tokens 32 --slots 256 \
        --reward "${reward[$task]}" >"$2.new"
    mv "$2.new" "$2"
}

# train RANK FACTOR: one run of $task and $seed, and its accuracy.
train() {
    local run=$folder/$(run_name "$1" "$2") rate adapters=()
    if [[ -f $run/accuracy.json ]]; then return; fi
    if (($1)); then adapters=(lora.rank="$1" lora.save=merged); fi
    rate=$(awk -v rank="$1" -v factor="$2" 'BEGIN { printf "%.3g", 2e-4 * factor * (rank > 0 ? 10 : 1) }')
    step "$task, seed $seed: $(run_name "$1" "$2"), rate $rate"
    if [[ ! -f $run/hf/config.json ]]; then
        mindrlhf train --sft_path_infer "$models/predict_qwen2_tiny.yaml" \
            --sft_path_train "$models/finetune_qwen2_tiny.yaml" --load_sft_checkpoint_infer "$folder/warm_start/hf" \
            --mind_dataset_dir "$folder/data/train.mindrecord" --save_ckpt_dir "$run" --output_dir "$run" \
            "reward.functions=[{name: ${reward[$task]}}]" seed="$seed" optimizer.lr="$rate" "${adapters[@]}" \
            trainer.resume_mode=auto trainer.total_steps="${steps:-${training[$task]}}" "${common[@]}"
    fi
    evaluate "$run/hf" "$run/accuracy.json"
}

accuracies() { sed -n 's/.*"accuracy": \([0-9.e-]*\).*/\1/p' "$@"; }

# table: mean and spread (standard deviation over the seeds) of the accuracies that are there.
table() {
    local task rank factor seed files
    for task in $tasks; do
        for rank in before $ranks; do
            for factor in $factors; do
                files=()
                for seed in $seeds; do
                    folder=$out/$task/seed$seed
                    if [[ $rank == before ]]; then file=$folder/before.json; else
                        file=$folder/$(run_name "$rank" "$factor")/accuracy.json
                    fi
                    if [[ -f $file ]]; then files+=("$file"); fi
                done
                ((${#files[@]})) || continue
                accuracies "${files[@]}" | awk -v task="$task" -v rank="$rank" -v factor="$factor" '
                    { n++; sum += $1; squares += $1 * $1; all = all " " $1 }
                    END {
                        mean = sum / n; off = squares - n * mean * mean
                        spread = n > 1 && off > 0 ? sqrt(off / (n - 1)) : 0
                        rate = rank == "before" ? "-" : sprintf("%.3g", 2e-4 * factor * (rank > 0 ? 10 : 1))
                        name = rank == "before" ? "warm start" : rank == 0 ? "full" : "rank " rank
                        printf "%-12s %-10s %-8s %.3f +- %.3f  (%s )\n", task, name, rate, mean, spread, all
                    }'
                if [[ $rank == before ]]; then break; fi
            done
        done
    done
}

for task in $tasks; do
    for seed in $seeds; do
        folder=$out/$task/seed$seed
        prepare "$task" "$seed" "$folder" "${held_out[$task]}" "$warm_steps"
        if [[ ! -f $folder/before.json ]]; then evaluate "$folder/warm_start/hf" "$folder/before.json"; fi
        for rank in $ranks; do
            for factor in $factors; do train "$rank" "$factor"; done
        done
        table >"$out/table.txt"
    done
done

step "Held-out accuracy, greedy: mean and standard deviation over seeds"
table | tee "$out/table.txt"
"$(dirname "$(command -v mindrlhf)")/python" scripts/lora_grid_figure.py "$out/table.txt" "$out/lora_grid.png"
