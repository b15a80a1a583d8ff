#!/usr/bin/env bash
# A small Qwen2-shaped model learns by GRPO to call a calculator: from an empty folder to a reward curve.
#
#   bash scripts/quickstart_tools.sh [--seed N] [--out DIR] [--steps N]
#
# --seed   of the problems, the first weights and everything drawn (default 0)
# --out    folder of all that is written (default out/quickstart_tools in the project's folder)
# --steps  of GRPO (default: trainer.total_steps of quickstart_tools_grpo.yaml)
#
# The settings are in examples/qwen_grpo_tutorial/quickstart_tools_{sft,grpo}.yaml, the model's shape in
# model_configs/qwen_grpo/{finetune,predict}_qwen2_tiny.yaml.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/quickstart_parts.sh"
conversation=(--max_new_tokens 192 --max_turns 3)

step "Problems of which most are too hard for the head, demonstrations, and a tokenizer that has learnt from them"
mindrlhf synthesize --task calculator --max_number 99 --train_size 8000 --test_size 400 \
    --careless_share 0.85 --tokenizer_vocab_size 512 --seed "$seed" --output_dir "$out/data"
head -n 3 "$out/data/demonstrations.jsonl"

step "MindRecord files"
for split in train test; do
    python "$example/rlhf_data.py" "${tokenizer[@]}" --dataset_type calculator --system_prompt "" \
        --file_path "$out/data/$split.jsonl" --output_path "$out/data/$split.mindrecord"
done

# Most demonstrations answer from the head, and a few call wrongly: imitation learns that, reward unlearns it.
step "Warm start: supervised fine-tuning of random weights on careless conversations"
mindrlhf sft "${tokenizer[@]}" --sft_path_train "$models/finetune_qwen2_tiny.yaml" \
    --sft_config "$example/quickstart_tools_sft.yaml" --mind_dataset_dir "$out/data/demonstrations.jsonl" \
    --save_ckpt_dir "$out/sft" --output_dir "$out/sft" seed="$seed"

step "Accuracy on the held-out problems before GRPO: the most probable answers, and drawn ones"
evaluate "$out/sft/hf" drawn "${conversation[@]}" --tools calculator --temperature 1
drawn=$accuracy
evaluate "$out/sft/hf" before "${conversation[@]}" --tools calculator
before=$accuracy

step "GRPO"
msrun --worker_num=1 --local_worker_num=1 --join=True --log_dir="$out/grpo/log" "$example/grpo_one_stage.py" \
    --sft_path_infer "$models/predict_qwen2_tiny.yaml" --sft_path_train "$models/finetune_qwen2_tiny.yaml" \
    --grpo_config "$example/quickstart_tools_grpo.yaml" --load_sft_checkpoint_infer "$out/sft/hf" \
    --mind_dataset_dir "$out/data/train.mindrecord" --save_data_file "$out/grpo/rollouts.mindrecord" \
    --save_ckpt_dir "$out/grpo" --output_dir "$out/grpo" seed="$seed" ${steps:+trainer.total_steps="$steps"}

step "Accuracy on the held-out problems after GRPO, with an error in answer to each call"
evaluate "$out/grpo/hf" without "${conversation[@]}" --tools none
without=$accuracy

step "Accuracy on the held-out problems after GRPO"
evaluate "$out/grpo/hf" after "${conversation[@]}" --tools calculator

step "Reward curve, calls and failures"
mindrlhf plot "$out/grpo" --accuracy "$before" "$accuracy" --title "Quick start with a calculator, seed $seed" \
    --output "$out/reward_curve.png"
mindrlhf report "$out/grpo"

step "Done"
cat <<END
held-out accuracy, greedy: $before before GRPO, $accuracy after, $without after and without the calculator
of drawn answers: $drawn before GRPO

$out/
    reward_curve.png       reward, calls of a conversation and failures by step
    grpo/report.html       the same and more, with conversations of each step
    grpo/hf/               the trained model, as an HF directory
    grpo/metrics.jsonl     every metric of every step
    grpo/tensorboard/      the same as TensorBoard events
    grpo/rollouts.mindrecord   every conversation with its reward
    eval_*.jsonl           the answers to the held-out problems
    sft/                   the warm start, with the same files
END
