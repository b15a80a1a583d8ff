# What the quick starts have in common; they source it: options, title lines, environment.
#
# Sets root (also the current folder), example, models, seed, out and steps; --minutes and --model are options of a script that
# sets minutes or model before.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
example=examples/qwen_grpo_tutorial
models=model_configs/qwen_grpo
script=$(basename "$0")
seed=0 out=out/${script%.sh} steps=""
refuse() {
    echo "$script: $1; give --seed N, --out DIR${minutes:+, --minutes N}${model:+, --model NAME} or --steps N" >&2
    exit 2
}
while (($#)); do
    case "$1=${2-}" in
        --seed=[0-9]*) seed=$2 ;;
        --steps=[1-9]*) steps=$2 ;;
        --minutes=[1-9]*) [[ -n ${minutes:-} ]] || refuse "--minutes is not understood"; minutes=$2 ;;
        --model=?*) [[ -n ${model:-} ]] || refuse "--model is not understood"; model=$2 ;;
        --out=?*) out=$(realpath -m "$2") ;;
        *) refuse "$1 ${2-} is not understood" ;;
    esac
    shift 2
done
[[ $seed$steps${minutes:-} =~ ^[0-9]+$ ]] || refuse "--seed, --steps and --minutes are whole numbers"
[[ -z ${model:-} || -f $root/$models/finetune_$model.yaml ]] || refuse "$models/finetune_$model.yaml does not exist"

source "$root/scripts/steps.sh"
trap 'exit 130' INT # after Ctrl-C msrun itself ends as if all were well

# evaluate MODEL NAME OPTION...: greedy answers to the held-out problems go to eval_NAME.jsonl; sets $accuracy.
evaluate() {
    local model=$1 name=$2
    shift 2
    mindrlhf eval --model "$model" --data "$out/data/test.mindrecord" --slots 256 "$@" \
        --output "$out/eval_$name.jsonl" | tee "$out/eval_$name.log"
    accuracy=$(sed -n 's/.*"accuracy": \([0-9.]*\).*/\1/p' "$out/eval_$name.log")
}

cd "$root"
mkdir -p "$out" || exit 2

step "Environment: .venv"
bash scripts/setup.sh
export PATH="$root/.venv/bin:$PATH" GLOG_v="${GLOG_v:-3}" # 3: errors only
tokenizer=(--vocab_path "$out/data/vocab.json" --merges_file_path "$out/data/merges.txt")
