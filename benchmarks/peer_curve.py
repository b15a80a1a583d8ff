"""Trains a model by TRL's GRPOTrainer and writes its curve: the peer's side of `curves.py`.

ENV/bin/python benchmarks/peer_curve.py --model MODEL --rows ROWS.jsonl --steps 60 --output out/peer

ROWS.jsonl: one object a line, `prompt` (text as the model reads it, control tokens included) and `ground_truth`. The
reward is this project's `gsm8k`, so that both sides are judged alike. Other settings are those of `curves.py`, and
prompts come in the order of the file. Into --output: `steps.jsonl` with a step's mean reward, mean length and seconds
(of the step alone, without writing the model), and `step_N/`, the model in float32 after every --measure-every steps.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DTYPES = {"fp32": False, "bf16": False, "bf16-autocast": True}  # dtype -> autocast


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--measure-every", type=int, default=20)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16-autocast", help="default: TRL's own, %(default)s")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(args.threads)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    args.output.mkdir(parents=True, exist_ok=True)
    trainer(args).train()


def trainer(args: argparse.Namespace):
    """Build the trainer; torch is imported here, behind the number of threads."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    rows = [json.loads(line) for line in args.rows.read_text(encoding="utf-8").splitlines()]
    answers = args.prompts * args.samples
    config = GRPOConfig(
        output_dir=str(args.output / "trl"),
        use_cpu=True,
        bf16=DTYPES[args.dtype],
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=answers // args.micro_batch,
        steps_per_generation=answers // args.micro_batch,
        num_generations=args.samples,
        max_completion_length=args.max_new_tokens,
        temperature=args.temperature,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=args.steps,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=args.seed,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype),
        reward_funcs=reward,
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        callbacks=[curve(args, tokenizer)],
    )


def reward(prompts, completions, ground_truth, **_) -> list[float]:
    """Score completions by this project's rule."""
    from mindrlhf.rewards.gsm8k import gsm8k

    rows = zip(prompts, completions, ground_truth, strict=True)
    return [gsm8k(prompt, text, {"ground_truth": truth}) for prompt, text, truth in rows]


def curve(args: argparse.Namespace, tokenizer):
    """Make the callback that writes the curve and the models."""
    from transformers import TrainerCallback

    class Curve(TrainerCallback):
        begun = seconds = 0.0

        def on_step_begin(self, *_, **__):
            self.begun = time.perf_counter()

        def on_step_end(self, *_, **__):
            self.seconds = time.perf_counter() - self.begun

        def on_log(self, _, state, __, logs=None, **more):
            if "reward" not in (logs or {}):
                return
            length = logs["completions/mean_length"]
            row = {"step": state.global_step, "reward": logs["reward"], "length": length, "seconds": self.seconds}
            with (args.output / "steps.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if state.global_step % args.measure_every == 0:
                folder = args.output / f"step_{state.global_step}"
                weights = {name: one.float() for name, one in more["model"].state_dict().items()}
                more["model"].save_pretrained(folder, state_dict=weights)
                tokenizer.save_pretrained(folder)

    return Curve()


if __name__ == "__main__":
    main()
