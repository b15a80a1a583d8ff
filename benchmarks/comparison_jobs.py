"""Compared jobs: their work, the peer's best settings for it, and the wanted ratios ours / peer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# Families of the same sizes: changes to the configuration of Qwen2, whose models the peer's script builds.
_QWEN3 = {"qk_norm": True, "attention_bias": False}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 352, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {"qwen2": {}, "qwen3": _QWEN3, "qwen3_moe": {**_QWEN3, **EXPERTS}}

GROWTH = (4, 8, 16, 32)  # samples of a prompt


@dataclass(frozen=True)
class ComparedJob:
    """One job, in flags that both scripts know; the peer's knows --lora-rank through `peer_lora.py`.

    what: words for the table. model: flags for the peer's script, which builds the model and its prompts. work: flags
    of the measured runs. peer: flags of the peer alone. micro_batches: sizes for the peer, in completions: it is
    measured with each, its fastest counts for time and its smallest for memory. tokens: maximum of our micro-batches;
    one size counts for both. goals: `step`, `gen`, `memory` -> greatest ratio.
    end_probability: chance of the end token at each position, set in the random weights; 0 leaves them alone.
    family: of `FAMILIES`; what the peer's model lacks is drawn. sees: the model is `vision_model.py`'s.
    steps: including two that are left out; more for jobs with more shapes to compile first.
    """

    what: str
    model: Mapping[str, str] = field(default_factory=dict)
    work: Mapping[str, str] = field(default_factory=dict)
    peer: tuple[str, ...] = ()
    micro_batches: tuple[int, ...] = (16, 8)
    tokens: int = 576
    goals: Mapping[str, float] = field(default_factory=dict)
    fixed_length: bool = True
    end_probability: float = 0.0
    family: str = "qwen2"
    sees: bool = False
    steps: int = 8

    @property
    def length_flags(self) -> dict[str, str]:
        return {name: self.work[name] for name in ("--max-prompt", "--max-completion") if name in self.work}


def _lengths(prompt: int, completion: int) -> dict[str, str]:
    return {"--max-prompt": str(prompt), "--max-completion": str(completion)}


JOBS: dict[str, ComparedJob] = {
    "reference": ComparedJob(
        "8 prompts x 64 tokens, 8 samples x 64", goals={"step": 0.50, "gen": 0.55, "memory": 1.0}
    ),
    "qwen3": ComparedJob("the same with Qwen3's norms of heads, no biases", goals={"step": 0.38}, family="qwen3"),
    "experts": ComparedJob(
        "the same with 16 experts of 352 columns, 2 for a token", goals={"step": 0.50}, family="qwen3_moe"
    ),
    "vision": ComparedJob(
        "4 prompts with an image of 64 tokens, 8 samples x 64, tower and text 11 M parameters",
        work={"--prompts": "4"},
        micro_batches=(16,),
        tokens=0,
        goals={"step": 0.50},
        sees=True,
    ),
    "reference-bfloat16": ComparedJob(
        "the same, the peer in bfloat16 and ours in float32", peer=("--dtype", "bf16"), goals={"step": 1.0}
    ),
    "long-prompt": ComparedJob(
        "8 x 512 tokens, 8 samples x 64",
        work=_lengths(512, 64),
        micro_batches=(8,),
        goals={"step": 0.30, "memory": 0.50},
    ),
    "large-vocabulary": ComparedJob(
        "vocabulary 32,000",
        model={"--model-vocab": "32000"},
        micro_batches=(8,),
        goals={"step": 0.50, "memory": 1.0},
    ),
    "long-completion": ComparedJob(
        "256 + 256 tokens", work=_lengths(256, 256), micro_batches=(8,), goals={"step": 0.55}
    ),
    "natural-lengths": ComparedJob(
        "end token allowed, up to 128 tokens",
        work=_lengths(64, 128) | {"--lr": "1e-12"},  # else the reward soon teaches not to end
        micro_batches=(16,),
        goals={"step": 0.45, "gen": 0.50},
        fixed_length=False,
        end_probability=0.02,
        steps=14,
    ),
    "two-updates": ComparedJob(
        "two updates on one batch", work={"--num-iterations": "2"}, micro_batches=(16,), goals={"step": 0.50}
    ),
    "wide": ComparedJob(
        "hidden 512, 8 layers", model={"--hidden": "512", "--layers": "8"}, micro_batches=(16,), goals={"step": 0.60}
    ),
    **{
        f"growth-{samples}": ComparedJob(
            f"{samples} samples of a prompt", work={"--num-generations": str(samples)}, micro_batches=(16,)
        )
        for samples in GROWTH
    },
    "qwen2.5-0.5b": ComparedJob(
        "Qwen2.5-0.5B's shape, 2 prompts x 64 tokens, 4 samples x 64",
        model={
            "--hidden": "896",
            "--layers": "24",
            "--heads": "14",
            "--kv-heads": "2",
            "--intermediate": "4864",
            "--model-vocab": "151936",
        },
        work={"--prompts": "2", "--num-generations": "4"},
        micro_batches=(4,),
        steps=7,
    ),
}  # fmt: skip
# Both sides: adapters of all linear modules with alpha twice the rank; `peer_lora.py` adds them to the peer's script.
JOBS["qwen2.5-0.5b-lora"] = replace(
    JOBS["qwen2.5-0.5b"],
    what="the same with adapters of rank 16 on both sides",
    work={**JOBS["qwen2.5-0.5b"].work, "--lora-rank": "16"},
    goals={"step": 0.60},
)
# A night's work for a laptop; ours with `--dtype bfloat16 rollout.weights=bfloat16`.
JOBS["overnight"] = replace(
    JOBS["qwen2.5-0.5b-lora"],
    what="the same, 8 prompts x 128 tokens, 8 samples x 256",
    work={"--lora-rank": "16", **_lengths(128, 256)},
    micro_batches=(8,),
    tokens=2304,
    goals={},
    steps=5,
)
