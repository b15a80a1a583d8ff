"""GRPO with a batch reward on conversations: a TRL script with another import line and model path."""

import random

from datasets import Dataset

from mindrlhf import GRPOConfig, GRPOTrainer  # from trl import GRPOConfig, GRPOTrainer

MODEL = "models/Qwen2.5-0.5B-Instruct"  # "Qwen/Qwen2.5-0.5B-Instruct"

random.seed(0)
pairs = [(random.randint(2, 99), random.randint(2, 99)) for _ in range(256)]
dataset = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": a + b} for a, b in pairs]
)


def right(completions, answer, **kwargs):
    """Give 1.0 if the answer's last word is the sum."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(text.rstrip(". ").endswith(str(number))) for text, number in zip(texts, answer, strict=True)]


def brief(completions, **kwargs):
    """Give less for longer answers."""
    return [-len(completion[0]["content"]) / 1000 for completion in completions]


training_args = GRPOConfig(
    output_dir="out/trl_grpo",
    per_device_train_batch_size=16,
    num_generations=8,
    max_completion_length=64,
    learning_rate=1e-6,
    max_steps=20,
    logging_steps=1,
    reward_weights=[1.0, 0.5],
    bf16=True,
    gradient_checkpointing=True,
    report_to="none",
)
trainer = GRPOTrainer(model=MODEL, reward_funcs=[right, brief], args=training_args, train_dataset=dataset)
trainer.train()
trainer.save_model("out/trl_grpo/model")
