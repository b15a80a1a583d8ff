"""Small models for tests: as compiled decoders, and as arrays for the float64 oracle of `reference_model`."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import reference_model
from safetensors.numpy import load_file

from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.checkpoint.hf_tensors import joined, split
from mindrlhf.configs.lora import Adapter
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.parameters import parameter_table

POSITIONS = 128


def small_config(**changes) -> ModelConfig:
    """Two layers of width 32 with grouped-query attention, untied, vocabulary 64."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2}
    return ModelConfig(**sizes | {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope_theta": 1e4} | changes)


def random_arrays(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Our name -> float32, drawn so that every parameter matters: log-probs spread over several nats."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for spec in parameter_table(config):
        values = rng.standard_normal(spec.shape)
        width = 1 / np.sqrt(spec.shape[-1])
        scale = {"norm": 0.2, "bias": 0.5, "embedding": 1.0, "lora_b": 0.5 / spec.scale * width}.get(
            spec.kind, 1.5 * width
        )
        arrays[spec.name] = (values * scale + (spec.kind == "norm")).astype(np.float32)
    return arrays


# Three layers, the second with experts and the others dense.
EXPERTS = {
    "family": "qwen3_moe",
    "attention_bias": False,
    "qk_norm": True,
    "num_layers": 3,
    "decoder_sparse_step": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


@dataclass(frozen=True, eq=False)
class SmallModel:
    """A configuration and its weights by our names; the arrays are never written to."""

    config: ModelConfig
    arrays: dict[str, np.ndarray]

    @classmethod
    def random(cls, seed: int = 0, **changes) -> "SmallModel":
        config = small_config(**changes)
        return cls(config, random_arrays(config, seed))

    @cached_property
    def specs(self) -> list:
        return list(parameter_table(self.config))

    def build(self, positions: int = POSITIONS, operators=None, **how):
        """(decoder, name -> Parameter) over an own copy of the weights, in graph mode on CPU.

        operators: those of the CPU by default. how: further arguments of `Decoder`.
        """
        import mindspore

        from mindrlhf.backend.cpu import CPU
        from mindrlhf.models.decoder import Decoder
        from mindrlhf.models.initialize import build_parameters

        mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
        parameters = build_parameters(self.specs, lambda spec: self.arrays[spec.name])
        operators = operators or CPU.operators()
        return Decoder(self.config, parameters, operators, positions, **how), parameters

    def logits(self, ids, arrays: dict[str, np.ndarray] | None = None, **options) -> np.ndarray:
        """float64[S, vocab] of the oracle for one sequence; `arrays` replaces weights by our names."""
        return reference_model.logits(self.config, self.merged(self.arrays | (arrays or {})), ids, **options)

    def merged(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Weights by HF names, with the adapters' products added in float64."""
        weights = {}
        for spec in self.specs:
            weights |= dict(split(spec, arrays[spec.name])) if not spec.adapts else {}
        for spec in self.specs:
            if spec.kind == "lora_b":
                both = spec.scale * (arrays[spec.name].astype(np.float64) @ arrays[spec.name.removesuffix("b") + "a"])
                for tensor, added in zip(spec.hf_tensors, both if spec.pieces else (both,), strict=True):
                    name = f"{tensor.module}.weight"
                    weights[name] = weights[name] + added
        return weights

    def log_probs(self, prompt, response, temperature: float = 1.0, arrays=None, **options) -> np.ndarray:
        """float64[R] of the oracle: log p of each response token."""
        start, ids = len(prompt), np.concatenate([prompt, response])
        rows = log_softmax(self.logits(ids[:-1], arrays, **options) / temperature)[start - 1 :]
        return rows[np.arange(len(response)), response]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.asarray(logits, np.float64) - np.max(logits, -1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@dataclass(frozen=True, eq=False)
class Golden(SmallModel):
    """A checkpoint with results that another implementation computed.

    sequences: int32[S] each, without their padding. logits_of, log_probs_of: float32[S, vocab] and float32[S - 1] for
    each sequence. greedy: int32[rows, new]. loss: the mean of -log p over all next tokens. grad_norms: by HF name.
    """

    sequences: list[np.ndarray]
    logits_of: list[np.ndarray]
    log_probs_of: list[np.ndarray]
    greedy: np.ndarray
    loss: float
    grad_norms: dict[str, float]

    @classmethod
    def load(cls, folder: Path) -> "Golden":
        """A model's folder, or an adapter's beside the folder of its base."""
        config, stored = read_adapted(folder) if (folder / "adapter_config.json").exists() else read_model(folder)
        data, summary = np.load(folder / "golden.npz"), json.loads((folder / "golden.json").read_text())
        masks = data["attention_mask"] == 1
        return cls(
            config=config,
            arrays={spec.name: joined(spec, stored) for spec in parameter_table(config)},
            sequences=[ids[mask] for ids, mask in zip(data["input_ids"], masks, strict=True)],
            logits_of=[rows[mask] for rows, mask in zip(data["logits"], masks, strict=True)],
            log_probs_of=[row[kept == 1] for row, kept in zip(data["token_logprobs"], data["valid"], strict=True)],
            greedy=data["greedy"],
            loss=summary["loss"],
            grad_norms={hf_name(key): norm for key, norm in summary["grad_norms"].items()},
        )


def norms_by_stored_name(golden: Golden, gradients) -> dict[str, float]:
    """Norms of gradients by our name, under the names of `Golden.grad_norms`, where gate and up of experts are one."""
    squares: dict[str, float] = {}
    for spec in golden.specs:
        if spec.trains:
            name = spec.hf_name
            if spec.pieces:
                name = name.removesuffix(".weight").replace(".gate_proj", ".gate_up_proj").replace(".up_", ".gate_up_")
            squares[name] = squares.get(name, 0.0) + float((gradients[spec.name].astype(np.float64) ** 2).sum())
    return {name: square**0.5 for name, square in squares.items()}


def read_model(folder: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    return read_hf_config(folder), load_file(folder / "model.safetensors")


def read_adapted(folder: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    raw = json.loads((folder / "adapter_config.json").read_text())
    config, stored = read_model(folder.parent / raw["base_model_name_or_path"])
    patterns = {key: raw[key] for key in ("rank_pattern", "alpha_pattern")}
    adapter = Adapter(raw["r"], raw["lora_alpha"], raw["use_rslora"], tuple(raw["target_modules"]), **patterns)
    own = {hf_name(key): array for key, array in load_file(folder / "adapter_model.safetensors").items()}
    return config.model_copy(update={"adapter": adapter}), stored | own


def hf_name(key: str) -> str:
    """The parameter's name within the model, of PEFT's key or a name."""
    return key.removeprefix("base_model.model.").replace(".default.", ".")
