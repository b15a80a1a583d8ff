#!/usr/bin/env bash
# A small Qwen2.5-VL-shaped model learns by GRPO to answer questions about images of handwritten digits.
#
#   bash scripts/quickstart_vision.sh [--seed N] [--out DIR] [--steps N]
#
# --seed   of the questions, the first weights and everything drawn (default 0)
# --out    folder of all that is written (default out/quickstart_vision in the project's folder)
# --steps  of GRPO (default: trainer.total_steps of quickstart_vision_grpo.yaml)
#
# The settings are in examples/qwen_grpo_tutorial/quickstart_vision_{sft,grpo}.yaml, the model's shape in
# model_configs/qwen_grpo/qwen2_5_vl_tiny. The digits are those of the Python package scikit-learn.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/quickstart_parts.sh"
greedy=(--max_new_tokens 24 --data "$out/data/test.jsonl")

step "Questions about digits, careless demonstrations, and a tokenizer that has learnt from them"
python -c "import sklearn" 2>"$out/sklearn.log" ||
    python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt scikit-learn
mindrlhf synthesize --task digits --train_size 10000 --test_size 400 --careless_share 0.6 \
    --tokenizer_vocab_size 330 --seed "$seed" --output_dir "$out/data"
tail -n 3 "$out/data/demonstrations.jsonl" | cut -c 1-220

step "A model of random weights, tower and text"
mindrlhf initialize --config "$models/qwen2_5_vl_tiny" --tokenizer_path "$out/data" --seed "$seed" --output "$out/random"

# Three in five demonstrations name the digits and then the smallest of them: imitation learns that, reward unlearns it.
step "Warm start: supervised fine-tuning on careless demonstrations"
mindrlhf sft --load_sft_checkpoint_train "$out/random" --mind_dataset_dir "$out/data/demonstrations.jsonl" \
    --sft_config "$example/quickstart_vision_sft.yaml" --save_ckpt_dir "$out/sft" --output_dir "$out/sft" seed="$seed"

step "Accuracy on held-out images before GRPO"
evaluate "$out/sft/hf" before "${greedy[@]}"
before=$accuracy

step "GRPO"
msrun --worker_num=1 --local_worker_num=1 --join=True --log_dir="$out/grpo/log" "$example/grpo_one_stage.py" \
    --grpo_config "$example/quickstart_vision_grpo.yaml" --load_sft_checkpoint_infer "$out/sft/hf" \
    --mind_dataset_dir "$out/data/train.jsonl" --save_data_file "$out/grpo/rollouts.mindrecord" \
    --save_ckpt_dir "$out/grpo" --output_dir "$out/grpo" seed="$seed" ${steps:+trainer.total_steps="$steps"}

step "Accuracy on held-out images after GRPO, and with black images in their place"
evaluate "$out/grpo/hf" unseen "${greedy[@]}" --data "$out/data/unseen.jsonl"
unseen=$accuracy
evaluate "$out/grpo/hf" after "${greedy[@]}"

step "Reward curve and report"
mindrlhf plot "$out/grpo" --accuracy "$before" "$accuracy" --title "Quick start with images, seed $seed" \
    --output "$out/reward_curve.png"
mindrlhf report "$out/grpo"

step "Done"
cat <<END
held-out accuracy, greedy: $before before GRPO, $accuracy after, $unseen after with black images

$out/
    reward_curve.png       reward and failures by step
    grpo/report.html       the same and more, with answers of each step
    grpo/hf/               the trained model, as an HF directory with its image processor's settings
    grpo/metrics.jsonl     every metric of every step
    grpo/tensorboard/      the same as TensorBoard events
    grpo/rollouts.mindrecord   every answer with its reward
    eval_*.jsonl           the answers to the held-out questions
    sft/                   the warm start, with the same files
END
