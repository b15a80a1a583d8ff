"""Run folders as a training leaves them, made up: metrics, rollouts and settings, without any training."""

import base64
import gzip
import json
from pathlib import Path

import numpy as np

from mindrlhf.files.json import write_json_lines
from mindrlhf.files.naming import ROLLOUTS_FOLDER
from mindrlhf.files.settings_file import SETTINGS_FILE
from mindrlhf.records.formats import write_text
from mindrlhf.report.answers import Answers

# What a model may write, and what would happen to a page that took it for markup.
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>{{ 7 * 7 }} \u2028 \ud800"


def metrics_row(step: int, steps: int, seed: int = 0, reward: float = 0.0) -> dict[str, float]:
    """One step of a run that learns. reward: added to what it is rewarded with."""
    random, done = np.random.default_rng((seed, step)), step / steps
    gen, update, ref = 2.0 + random.random() / 4, 3.0 + random.random() / 4, 0.6
    return {
        "critic/rewards/mean": float(0.1 + 0.8 * done + random.normal() / 30 + reward),
        "reward/gsm8k/mean": float(0.1 + 0.7 * done),
        "reward/format/mean": float(0.4 + 0.5 * done),
        "actor/loss": float(random.normal() / 100),
        "actor/kl_loss": float(0.02 * done + random.random() / 500),
        "actor/entropy": float(2.0 - 1.2 * done + random.normal() / 50),
        "actor/pg_clipfrac": float(random.random() / 50),
        "actor/grad_norm": float("nan") if step == 3 else float(0.5 + random.random()),
        "actor/lr": 1e-6,
        "response_length/mean": float(180 + 60 * done + 5 * random.normal()),
        "response_length/clip_ratio": float(0.3 - 0.2 * done),
        "group/zero_std_fraction": float(0.5 * done),
        "rollout_corr/k3_kl": 1e-6,
        "tools/failure_frequency": 0.0,
        "rollout_corr/log_prob_diff/mean": 1e-6,
        "timing_s/gen": gen,
        "timing_s/update_actor": update,
        "timing_s/ref": ref,
        "timing_s/reward": 0.05,
        "timing_s/compile": 30.0 if step == 1 else 0.0,
        "timing_s/step": gen + update + ref + 0.4 + (30.0 if step == 1 else 0.0),
        "perf/throughput": float(5000 + 100 * random.normal()),
        "perf/max_memory_allocated_gb": 3.2,
        "perf/cpu_memory_used_gb": 2.8,
        "swap/role_gb/kv_cache": 0.5,
        "swap/role_gb/reference": 1.5,
        **({"val-core/gsm8k/acc/mean@1": float(0.1 + 0.6 * done)} if step % 5 == 0 else {}),
    }


def make_run(
    folder: Path, steps: int = 30, seed: int = 0, reward: float = 0.0, rollouts: bool = True, lr: float = 1e-6
) -> Path:
    """The folder, with `metrics.jsonl`, `settings.json` and, with rollouts, a dump of every step."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": step, **metrics_row(step, steps, seed, reward)} for step in range(1, steps + 1)]
    write_json_lines(folder / "metrics.jsonl", rows)
    settings = {"grpo": {"optimizer": {"lr": lr}, "seed": seed, "rollout": {"num_generations": 4}}, "command": "train"}
    settings["starts"] = [{"date": f"2026-05-0{seed + 1}T10:00:00+00:00", "host": "h", "command": f"train seed={seed}"}]
    (folder / SETTINGS_FILE).write_text(json.dumps(settings))
    for step in range(1, steps + 1) if rollouts else ():
        write_text(folder / ROLLOUTS_FOLDER, step, rollout_rows(step))
    return folder


def unpacked(answers: Answers) -> list[dict]:
    """The groups of all chunks of a report, in order."""
    return [one for packed in answers.chunks.values() for one in json.loads(gzip.decompress(base64.b64decode(packed)))]


def rollout_rows(step: int, prompts: int = 2, samples: int = 4) -> list[dict]:
    """A step's dump; the first answer of step 1 is HOSTILE. Prompt 7 is in every third step, with equal answers and
    figures of tokens."""
    rows = []
    for prompt in range(prompts):
        for sample in range(samples):
            right = (sample + step) % 3 == 0
            answer = f"Natalia sold {24 + sample} + 48 clips.\n#### {72 if right else 70 + sample}"
            rows.append(
                {
                    "step": step,
                    "prompt_id": 10 * step + prompt,
                    "sample_index": sample,
                    "prompt": f"Problem {10 * step + prompt}: Natalia sold clips to 48 of her friends in April, and "
                    "then she sold half as many in May. How many did she sell altogether?",
                    "completion": HOSTILE.replace("\ud800", "") if (step, prompt, sample) == (1, 0, 0) else answer,
                    "ground_truth": "72",
                    "reward": float(right),
                    "rewards": {"gsm8k": float(right), "format": 1.0},
                    "advantage": 1.5 if right else -0.5,
                    "finish_reason": "length" if sample == 3 else "eos",
                    "prompt_length": 40,
                    "response_length": 12 + sample,
                }
            )
    if step % 3 == 0:
        rows += [repeated_row(step, sample) for sample in range(samples)]
    return rows


def repeated_row(step: int, sample: int) -> dict:
    """Two different answers, the right one in more samples the later the step; the second token is clipped."""
    right = 10 * (sample + 1) <= step
    texts = [" 7", "2" if right else "1", "<|im_end|>"]
    figures = {"advantage": [1.5, -0.5, 0.25], "ratio": [1.0, 1.3, 0.9], "entropy": [0.1, 0.7, 0.0]}
    return {
        "step": step,
        "prompt_id": 7,
        "sample_index": sample,
        "prompt": "The prompt that comes again",
        "completion": "".join(texts),
        "ground_truth": "72",
        "reward": float(right),
        "rewards": {"gsm8k": float(right), "format": 1.0},
        "advantage": 0.5,
        "finish_reason": "eos",
        "prompt_length": 5,
        "response_length": 2,
        "tokens": {"text": texts, "sampled": [1, 1, 0], "clipped": [0.0, 1.0, 0.0], **figures},
    }
