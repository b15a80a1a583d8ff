"""GRPO with held-out problems and a callback: a TRL script with another import line and model path."""

import random

from datasets import Dataset

from mindrlhf import GRPOConfig, GRPOTrainer, TrainerCallback  # from trl and transformers

MODEL = "models/Qwen2.5-0.5B-Instruct"  # "Qwen/Qwen2.5-0.5B-Instruct"

random.seed(0)
numbers = [random.sample(range(10, 100), 3) for _ in range(160)]
dataset = Dataset.from_list(
    [{"prompt": f"The largest of {', '.join(map(str, each))} is", "largest": str(max(each))} for each in numbers]
).train_test_split(test_size=32, seed=0)


def largest(prompts, completions, largest, **kwargs):
    pairs = zip(completions, largest, strict=True)
    return [float(completion.strip().startswith(number)) for completion, number in pairs]


class StopWhenSolved(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        print(f"step {state.global_step}: eval_reward {metrics['eval_reward']:.2f}")
        if metrics["eval_reward"] > 0.95:
            control.should_training_stop = True
        return control


training_args = GRPOConfig(
    output_dir="out/trl_eval",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    num_generations=4,
    max_completion_length=8,
    max_steps=20,
    beta=0.04,
    loss_type="dr_grpo",
    scale_rewards=False,
    eval_strategy="steps",
    eval_steps=5,
    save_strategy="no",
    report_to="none",
)
trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=largest,
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    callbacks=[StopWhenSolved()],
)
trainer.train()
print(trainer.evaluate())
