#!/usr/bin/env bash
# A small Qwen2-shaped model learns arithmetic word problems by GRPO: from an empty folder to a reward curve.
#
#   bash scripts/quickstart.sh [--seed N] [--out DIR] [--steps N] [--model NAME]
#
# --seed   of the problems, the first weights and everything drawn (default 0)
# --out    folder of all that is written (default out/quickstart in the project's folder)
# --steps  of GRPO (default: trainer.total_steps of quickstart_grpo.yaml)
# --model  the model's shape is in model_configs/qwen_grpo/{finetune,predict}_NAME.yaml (default qwen2_tiny; qwen3_moe_tiny has
#          eight experts, of which two compute a token, and learns in 120 steps)
#
# The settings are in examples/qwen_grpo_tutorial/quickstart_{sft,grpo}.yaml.
set -euo pipefail

model=qwen2_tiny
source "$(dirname "${BASH_SOURCE[0]}")/quickstart_parts.sh"

step "Arithmetic word problems in GSM8K's format, and a tokenizer that has learnt from them"
mindrlhf synthesize --task arithmetic --max_number 10 --train_size 4000 --test_size 400 \
    --careless_share 0.75 --tokenizer_vocab_size 512 --seed "$seed" --output_dir "$out/data"
head -n 2 "$out/data/train.jsonl"

step "MindRecord files"
for split in demonstrations train test; do
    python "$example/rlhf_data.py" "${tokenizer[@]}" --dataset_type arithmetic --template plain \
        --file_path "$out/data/$split.jsonl" --output_path "$out/data/$split.mindrecord"
done

# Three in four demonstrations of two-step problems stop after step one: imitation learns that, reward unlearns it.
step "Warm start: supervised fine-tuning of random weights on careless demonstrations"
mindrlhf sft "${tokenizer[@]}" --sft_path_train "$models/finetune_$model.yaml" \
    --sft_config "$example/quickstart_sft.yaml" --mind_dataset_dir "$out/data/demonstrations.mindrecord" \
    --save_ckpt_dir "$out/sft" --output_dir "$out/sft" seed="$seed"

step "Accuracy on the held-out problems before GRPO"
evaluate "$out/sft/hf" before --max_new_tokens 24
before=$accuracy

step "GRPO"
msrun --worker_num=1 --local_worker_num=1 --join=True --log_dir="$out/grpo/log" "$example/grpo_one_stage.py" \
    --sft_path_infer "$models/predict_$model.yaml" --sft_path_train "$models/finetune_$model.yaml" \
    --grpo_config "$example/quickstart_grpo.yaml" --load_sft_checkpoint_infer "$out/sft/hf" \
    --mind_dataset_dir "$out/data/train.mindrecord" --save_data_file "$out/grpo/rollouts.mindrecord" \
    --save_ckpt_dir "$out/grpo" --output_dir "$out/grpo" seed="$seed" ${steps:+trainer.total_steps="$steps"}

step "Accuracy on the held-out problems after GRPO"
evaluate "$out/grpo/hf" after --max_new_tokens 24

step "Reward curve"
mindrlhf plot "$out/grpo" --accuracy "$before" "$accuracy" --title "Quick start, seed $seed" \
    --output "$out/reward_curve.png"

step "Report"
mindrlhf report "$out/grpo"

step "Done"
cat <<END
held-out accuracy, greedy: $before before GRPO, $accuracy after

$out/
    reward_curve.png       reward, length and entropy by step
    grpo/report.html       the same and more, with the answers of each step
    grpo/hf/               the trained model, as an HF directory
    grpo/metrics.jsonl     every metric of every step
    grpo/tensorboard/      the same as TensorBoard events
    grpo/rollouts.mindrecord   every response with its reward
    eval_before.jsonl, eval_after.jsonl   the answers to the held-out problems
    sft/                   the warm start, with the same files

ask it yourself (it knows numbers up to 10, and no chat: a plain question):
    echo "Pia has 4 stones and Leo has 3. How many stones do they have together?" |
        mindrlhf chat --model $out/grpo/hf --template plain
END
