#!/usr/bin/env bash
# Runs a job of four workers on two hosts, which are two network namespaces of this machine: each has an address of its
# own and two of the workers, and all that they have in common is one (virtual) cable and the disk.
#
#   bash scripts/two_hosts.sh [--out DIR] [--split] [--cut SECONDS] [-- SCRIPT ARGUMENTS...]
#
# --out   folder of all that is written (default out/two_hosts in the project's folder)
# --split the default job trains on the first host, with the batches that the second one has drawn one step behind
# --cut   the cable is cut for so many seconds once rank 0 has written the line of a first step
# SCRIPT  what msrun starts on both hosts (default: two steps of GRPO with a tiny random model on made-up problems,
#         trained with model_parallel 2 x pipeline_stage 2, generating with data_parallel 2 x model_parallel 2)
#
# Needs Linux, iproute2, and the right to make network namespaces (root); exit code 3 says that it is missing. Nothing
# of this machine's own network is touched, and the namespaces are gone afterwards, however it ends.
# docs/two_hosts.md has the commands for two machines.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
out=$root/out/two_hosts
addresses=(10.77.0.1 10.77.0.2)
port=8118
hosts=("mindrlhf-$$-0" "mindrlhf-$$-1")
split="" cut=""

refuse() {
    echo "two_hosts.sh: $2" >&2
    exit "$1"
}
while (($#)); do
    case "$1" in
        --out) out=$(realpath -m "${2:?--out needs a folder}") && shift 2 ;;
        --split) split=1 && shift ;;
        --cut)
            [[ ${2-} =~ ^[0-9]+$ ]] || refuse 2 "--cut needs a number of seconds"
            cut=$2 && shift 2
            ;;
        --) shift && break ;;
        *) refuse 2 "$1 is not understood; give --out DIR, --split, --cut SECONDS, and a command of your own after --" ;;
    esac
done
job=("$@")

command -v ip >/dev/null || refuse 3 "the command ip is missing; install iproute2"

# Whatever is still running in a namespace was started there by this script.
clean_up() {
    local host pids
    for host in "${hosts[@]}"; do
        pids=$(ip netns pids "$host" 2>/dev/null || true)
        [[ -z $pids ]] || kill -KILL $pids 2>/dev/null || true
        ip netns del "$host" 2>/dev/null || true
    done
}
trap clean_up EXIT
trap 'exit 130' INT TERM

make_hosts() {
    ip netns add "${hosts[0]}" && ip netns add "${hosts[1]}" &&
        ip link add eth0 netns "${hosts[0]}" type veth peer name eth0 netns "${hosts[1]}"
}
error=$(make_hosts 2>&1) || refuse 3 "network namespaces cannot be made here ($error); run it as root on Linux"
for i in 0 1; do
    ip -n "${hosts[i]}" address add "${addresses[i]}/24" dev eth0
    ip -n "${hosts[i]}" link set lo up
    ip -n "${hosts[i]}" link set eth0 up
done

if ! command -v msrun mindrlhf >/dev/null; then
    bash "$root/scripts/setup.sh"
    export PATH="$root/.venv/bin:$PATH"
fi
export GLOG_v="${GLOG_v:-3}" # 3: errors only
rm -rf "$out/log"
mkdir -p "$out/log"

# tiny_job: makes the data of the default job, and sets `job`.
tiny_job() {
    local data=$out/data models=$root/model_configs/qwen_grpo side shape
    mindrlhf synthesize --output_dir "$data" --train_size 64 --test_size 8 --max_number 20 --tokenizer_vocab_size 300
    mindrlhf data --file_path "$data/train.jsonl" --output_path "$data/train.mindrecord" --tokenizer_path "$data" \
        --dataset_type arithmetic --template plain
    job=(
        "$root/examples/qwen_grpo_tutorial/grpo_one_stage.py"
        --sft_path_train "$models/finetune_qwen2_tiny.yaml" --sft_path_infer "$models/predict_qwen2_tiny.yaml"
        --vocab_path "$data/vocab.json" --merges_file_path "$data/merges.txt"
        --mind_dataset_dir "$data/train.mindrecord" --save_ckpt_dir "$out/ckpt" --use_parallel True
        data.prompts_per_step=4 rollout.num_generations=4 rollout.max_new_tokens=16
    )
    if [[ -n $split ]]; then
        job+=(--trainer_ranks 2 --generator_ranks 2 trainer.staleness=1 trainer.total_steps=4)
    else
        job+=(
            train_yaml.parallel_config.pipeline_stage=2 train_yaml.parallel_config.micro_batch_num=2
            infer_yaml.parallel_config.data_parallel=2 trainer.total_steps=2
        )
    fi
    for side in train infer; do
        for shape in hidden_size=32 intermediate_size=64 num_layers=2 num_heads=4 n_kv_heads=2; do
            job+=("${side}_yaml.model.model_config.$shape")
        done
        job+=("${side}_yaml.parallel_config.model_parallel=2")
    done
}
((${#job[@]})) || tiny_job

processes=()
for i in 0 1; do
    ip netns exec "${hosts[i]}" msrun --worker_num=4 --local_worker_num=2 --node_rank="$i" \
        --master_addr="${addresses[0]}" --master_port="$port" --join=True --log_dir="$out/log/host$i" \
        "${job[@]}" >"$out/log/host$i.log" 2>&1 &
    processes+=($!)
done

# cut_cable: once rank 0 has written the line of a step; not if the job ends before.
cut_cable() {
    until grep -qsE '^ *[0-9]+/[0-9]+ ' "$out/log/host0/worker_0.log"; do
        kill -0 "${processes[0]}" 2>/dev/null || return 0
        sleep 0.1
    done
    ip -n "${hosts[1]}" link set eth0 down
    sleep "$cut"
    ip -n "${hosts[1]}" link set eth0 up
    echo "the cable was cut for $cut s"
}
if [[ -n $cut ]]; then cut_cable & fi

codes=()
for process in "${processes[@]}"; do
    code=0
    wait "$process" || code=$?
    codes+=("$code")
done

for i in 0 1; do
    if ((codes[i])); then
        echo "two_hosts.sh: host $i (${addresses[i]}) ended with code ${codes[i]}:" >&2
        tail -n 20 "$out/log/host$i.log" >&2
    fi
done
((codes[0] == 0 && codes[1] == 0)) || exit 1
grep -hv '^\[' "$out/log/host0/worker_0.log" || true # what rank 0 says, without MindSpore's log
echo "both hosts ended well; ranks 0 and 1 ran on ${addresses[0]}, ranks 2 and 3 on ${addresses[1]}; logs in $out/log"
