# Two small tasks with their problems, tokenizer and warm start; sourced by the scripts that compare runs on them.
#
# The script has set `root`, the project's folder, and defines `refuse MESSAGE`, which ends it.
# shellcheck shell=bash

models=model_configs/qwen_grpo
declare -A problems=(
    [arithmetic]="--max_number 10 --careless_share 0.75"
    [countdown]="--operands 2 --max_number 80 --careless_share 0.6"
)
declare -A warming=([arithmetic]=200 [countdown]=400) # steps
declare -A reward=([arithmetic]=gsm8k [countdown]=countdown)

check_tasks() {
    for name in "$@"; do [[ $name == arithmetic || $name == countdown ]] || refuse "there is no task $name here"; done
}

source "$root/scripts/steps.sh"

# open_project OUT: into the project's folder, with `mindrlhf` there and the folder OUT.
open_project() {
    cd "$root"
    mkdir -p "$1" || exit 2
    if ! command -v mindrlhf >/dev/null; then
        step "Environment: .venv"
        bash scripts/setup.sh
        export PATH="$root/.venv/bin:$PATH"
    fi
    export GLOG_v="${GLOG_v:-3}" # 3: errors only
}

# prepare TASK SEED FOLDER TEST_SIZE [STEPS]: problems in FOLDER/data, and in FOLDER/warm_start a model that imitates
# careless demonstrations of them.
prepare() {
    local task=$1 seed=$2 data=$3/data warm=$3/warm_start size=$4 steps=${5:-${warming[$1]}} tokenizer options split
    if [[ -f $warm/hf/config.json ]]; then return; fi
    tokenizer=(--vocab_path "$data/vocab.json" --merges_file_path "$data/merges.txt")
    step "$task, seed $seed: problems, tokenizer and MindRecord files"
    read -ra options <<<"${problems[$task]}"
    mindrlhf synthesize --task "$task" "${options[@]}" --train_size 4000 --test_size "$size" \
        --tokenizer_vocab_size 512 --seed "$seed" --output_dir "$data"
    for split in demonstrations train test; do
        mindrlhf data "${tokenizer[@]}" --dataset_type "$task" --template plain \
            --file_path "$data/$split.jsonl" --output_path "$data/$split.mindrecord"
    done
    step "$task, seed $seed: warm start on careless demonstrations"
    mindrlhf sft "${tokenizer[@]}" --sft_path_train "$models/finetune_qwen2_tiny.yaml" \
        --sft_config examples/qwen_grpo_tutorial/quickstart_sft.yaml \
        --mind_dataset_dir "$data/demonstrations.mindrecord" --save_ckpt_dir "$warm" --output_dir "$warm" \
        seed="$seed" trainer.total_steps="$steps"
}
