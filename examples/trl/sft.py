"""Supervised fine-tuning on conversations: a TRL script with another import line and model path."""

from datasets import Dataset

from mindrlhf import SFTConfig, SFTTrainer  # from trl import SFTConfig, SFTTrainer

MODEL = "models/Qwen2.5-0.5B"  # "Qwen/Qwen2.5-0.5B"


def conversation(number):
    return [
        {"role": "user", "content": f"Is {number} even?"},
        {"role": "assistant", "content": "Yes." if number % 2 == 0 else "No."},
    ]


dataset = Dataset.from_list([{"messages": conversation(number)} for number in range(200)])
dataset = dataset.train_test_split(test_size=40, seed=0)
training_args = SFTConfig(
    output_dir="out/trl_sft",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=1e-5,
    num_train_epochs=2,
    max_length=128,
    warmup_ratio=0.1,
    lr_scheduler_type="cosine",
    eval_strategy="epoch",
    save_strategy="no",
    packing=True,
    report_to="none",
)
trainer = SFTTrainer(model=MODEL, args=training_args, train_dataset=dataset["train"], eval_dataset=dataset["test"])
trainer.train()
trainer.save_model("out/trl_sft/model")
