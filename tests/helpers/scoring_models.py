"""Small reward models and judges for tests, and their scores in float64."""

import json
from pathlib import Path

import numpy as np
import reference_model
from safetensors.numpy import load_file, save_file
from small_model import random_arrays, small_config

from mindrlhf.checkpoint.hf import CONFIG_FILE, save_hf
from mindrlhf.checkpoint.peft import PEFT_WEIGHTS_FILE, write_adapter
from mindrlhf.checkpoint.peft_config import OWN_FILE, PEFT_CONFIG_FILE, Base
from mindrlhf.configs.lora import Adapter
from mindrlhf.configs.model import ModelConfig
from mindrlhf.data.tokenizer import Tokenizer, train_tokenizer
from mindrlhf.models.parameters import parameter_table

TEXTS = ["What is 2 + 2? The answer is 4. yes no maybe " * 8]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = {
    "qwen2": {"attention_bias": True},
    "qwen3": {"attention_bias": False, "qk_norm": True},
    "llama": {"attention_bias": False},
}


def small_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """300 ids at most, among them the words yes and no."""
    tokenizer = train_tokenizer(TEXTS, 300)
    return tokenizer.with_chat_template(template) if template else tokenizer


def scoring_config(family: str = "qwen2", **changes) -> ModelConfig:
    sizes = {"family": family, "vocab_size": 300, "value_head": True, "pad_token_id": 282}
    more = {"max_position_embeddings": 4096, "num_layers": 1}
    return small_config(**sizes | FAMILIES[family] | more | changes)


def write_scoring_model(folder: Path, config: ModelConfig, seed: int = 0, tokenizer: Tokenizer | None = None) -> dict:
    """Write a folder in HF's format with random weights; returns them by HF's names."""
    arrays = random_arrays(config, seed)
    tensors = ((spec, arrays[spec.name]) for spec in parameter_table(config))
    save_hf(folder, config, tensors, tokenizer=tokenizer or small_tokenizer())
    return {spec.hf_name: arrays[spec.name] for spec in parameter_table(config)}


def write_classifier_adapter(folder: Path, base: Path, config: ModelConfig, head: bool = True, seed: int = 1) -> dict:
    """Write an adapter over `base`, with a score of its own as PEFT's for SEQ_CLS; returns its arrays."""
    adapted = config.model_copy(update={"adapter": Adapter(4, 8.0, target_modules=("q_proj", "down_proj"))})
    arrays = random_arrays(adapted, seed)
    own = {spec.hf_name: arrays[spec.name] for spec in parameter_table(adapted) if spec.adapts}
    write_adapter(folder, adapted.adapter, own, Base(str(base)))
    score = {"score.weight": np.random.default_rng(seed).standard_normal((1, config.hidden_size)).astype(np.float32)}
    score |= {"score.bias": np.array([0.25], np.float32)}
    if head:
        file = folder / PEFT_WEIGHTS_FILE
        save_file(load_file(file) | {f"base_model.model.{name}": array for name, array in score.items()}, file)
        change_config(folder, PEFT_CONFIG_FILE, task_type="SEQ_CLS", modules_to_save=["classifier", "score"])
        (folder / OWN_FILE).unlink()
    return own | (score if head else {})


def merged(weights: dict, adapter: dict) -> dict:
    """Weights with an adapter's products and score, in float64."""
    scale, found = 8.0 / 4, dict(weights)
    for name in (name for name in adapter if name.endswith(".lora_B.weight")):
        module = name.removesuffix(".lora_B.weight")
        first, second = (adapter[f"{module}.lora_{letter}.weight"].astype(np.float64) for letter in "AB")
        found[f"{module}.weight"] = found[f"{module}.weight"] + scale * second @ first
    return found | {name: array for name, array in adapter.items() if name.startswith("score.")}


def change_config(folder: Path, name: str = CONFIG_FILE, **changes) -> None:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def last_score(config: ModelConfig, weights: dict[str, np.ndarray], ids) -> float:
    """A classifier's output at the last of the ids, in float64."""
    logits = reference_model.logits(config, weights | {"lm_head.weight": weights["score.weight"]}, ids)
    return float(logits[-1, 0] + weights.get("score.bias", np.zeros(1))[0])


def odds(config: ModelConfig, weights: dict[str, np.ndarray], ids, words) -> float:
    """P(first) / (P(first) + P(second)) of a language model's next token, in float64."""
    first, second = np.exp(reference_model.logits(config, weights, ids)[-1, list(words)])
    return float(first / (first + second))
