"""Checkpoints of reward models and judges, with a head of one output."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mindrlhf.checkpoint.hf import CONFIG_FILE
from mindrlhf.checkpoint.local import local_model
from mindrlhf.checkpoint.peft import PEFT_WEIGHTS_FILE, StoredAdapter, is_adapter, read_adapter
from mindrlhf.checkpoint.peft_config import PEFT_CONFIG_FILE
from mindrlhf.checkpoint.safetensors_file import index_safetensors, write_safetensors
from mindrlhf.checkpoint.stored_tensor import StoredTensor
from mindrlhf.checkpoint.weight_source import index_weights
from mindrlhf.checkpoint.weights import Reader, Weights, checkpoint_config, hf_folder
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.reward_models import JudgeSettings, RewardModelSettings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.files.json import read_json, write_json
from mindrlhf.models.parameters import EMBEDDING, HEAD, VALUE_HEAD, ParameterSpec, parameter_table

SCORE, BIAS = "score.weight", "score.bias"
CLASSIFIER = "SEQ_CLS"  # PEFT's task_type
HEADS = (["score"], ["classifier", "score"])  # its modules_to_save of one
_PEFT = "base_model.model."


@dataclass(frozen=True)
class ScoringModel:
    """Description of a reward model or a judge; its weights are not read yet.

    stored: architecture of the model, or of an adapter's base. config: the architecture that runs: with one output, or
    with the vocabulary's for generated verdicts. words: ids of a judge's words, if its head is made of them.
    """

    settings: RewardModelSettings
    stored: ModelConfig
    config: ModelConfig
    tokenizer: Tokenizer
    words: tuple[int, int] | None = None

    def weights(self) -> tuple[Reader, float]:
        """Return a reader of the parameters of `config`, and the score's bias. Raises UserError."""
        path, folder = _base_and_adapter(local_model(self.settings.path), self.settings, weights=True)
        base = Weights(path, self.stored, 0)
        adapter, head = read_classifier_adapter(Path(folder)) if folder else (None, {})
        classifies = self.stored.value_head and not head
        tensors = index_weights(Path(path)) if classifies else {}
        if classifies:
            _check_head(path, tensors)
        read = base.merged(adapter) if adapter else base.reader()
        if isinstance(self.settings, JudgeSettings):
            return self._of_words(read), 0.0
        if not (classifies or head):
            right = "train it with task_type SEQ_CLS, or give the base of its training"
            raise UserError(f"{folder}: holds no {SCORE}, and neither does its base; {right}.")
        bias = tensors[BIAS].read() if BIAS in tensors else head.get(BIAS, np.zeros(1))
        return lambda spec: head[SCORE] if head and spec.name == VALUE_HEAD else read(spec), float(bias.reshape(-1)[0])

    def _of_words(self, read: Reader) -> Reader:
        """Make a head whose output is the log-odds of the two words."""
        if self.words is None:
            return read
        name = EMBEDDING if self.stored.tie_word_embeddings else HEAD
        (rows,) = (spec for spec in parameter_table(self.stored) if spec.name == name)

        def read_odds(spec: ParameterSpec) -> np.ndarray:
            if spec.name != VALUE_HEAD:
                return read(spec)
            good, bad = read(rows)[list(self.words)]
            return (good - bad)[None]

        return read_odds


def open_scoring_model(settings: RewardModelSettings, weights: bool = True) -> ScoringModel:
    """Read and check a model's architecture and tokenizer.

    weights: see `local_model`. Raises UserError for a model of the other kind, and for words that are no tokens.
    """
    path = local_model(settings.path, weights)
    base, adapter = _base_and_adapter(path, settings, weights)
    stored = checkpoint_config(base)
    folder = hf_folder(base)
    if stored is None or folder is None:
        raise UserError(f"{base}: has no {CONFIG_FILE}; give a reward model or judge in HF's format, or a hub's id.")
    tokenizer = Tokenizer.from_path(path if Path(path, "tokenizer.json").is_file() else folder)
    _check_positions(path, settings, stored)
    if isinstance(settings, JudgeSettings):
        if stored.value_head:
            raise UserError(f"{path}: is a classifier, and a judge generates; give a language model, or use model.")
        words = _word_ids(tokenizer, settings) if settings.verdict == "log_probs" else None
        return ScoringModel(settings, stored, stored.as_critic() if words else stored, tokenizer, words)
    if not (stored.value_head or adapter):
        right = "give a model of the class ...ForSequenceClassification, or use judge"
        raise UserError(f"{path}: is a model that generates, and has no score; {right}.")
    labels = _labels(read_json(folder / CONFIG_FILE)) if stored.value_head and not adapter else 1
    if labels != 1:
        raise UserError(f"{path}: has {labels} labels, and a reward model has one; give one with num_labels 1.")
    return ScoringModel(settings, stored, stored.as_critic(), tokenizer)


def _base_and_adapter(path: str, settings: RewardModelSettings, weights: bool) -> tuple[str, str | None]:
    """Find the folders of a model and of an adapter over it."""
    adapter = settings.adapter and local_model(settings.adapter, weights)
    if adapter and not is_adapter(adapter):
        raise UserError(f"{adapter}: has no {PEFT_CONFIG_FILE}; give an adapter in PEFT's format.")
    if not is_adapter(path):
        return path, adapter
    if adapter:
        raise UserError(f"{path}: is an adapter, and so is {adapter}; give the base model as path, or one adapter.")
    named = read_json(Path(path, PEFT_CONFIG_FILE)).get("base_model_name_or_path")
    if not isinstance(named, str):
        raise UserError(f"{path}: names no base model; give it as path, and this folder as adapter.")
    base = local_model(named, weights)
    if not Path(base).exists() or is_adapter(base):
        raise UserError(f"{path}: is an adapter of {named}, which is no model here; give the base model as path.")
    return base, path


def _check_positions(path: str, settings: RewardModelSettings, stored: ModelConfig) -> None:
    generated = settings.verdict_tokens
    longest = settings.max_length + generated
    if longest > stored.max_position_embeddings:
        found = f"max_length asks for {longest} positions, and the model has {stored.max_position_embeddings}"
        raise UserError(f"{path}: {found}; set max_length to {stored.max_position_embeddings - generated} or fewer.")


def _labels(raw: Mapping[str, Any]) -> int:
    """Count a configuration's labels; 1 if the weights have to tell."""
    labels = raw.get("id2label")
    named = len(labels) if isinstance(labels, dict) else 1
    stated = raw.get("num_labels")
    return stated if isinstance(stated, int) else named


def _word_ids(tokenizer: Tokenizer, settings: JudgeSettings) -> tuple[int, int]:
    """Find the tokens of a judge's words. Raises UserError."""
    ids = [tokenizer.encode(word) for word in settings.words]
    for word, tokens in zip(settings.words, ids, strict=True):
        if len(tokens) != 1:
            right = "give words of one token each, or set verdict to generated"
            raise UserError(f"{settings.path}: judge's word {word!r} is {len(tokens)} tokens there; {right}.")
    if ids[0] == ids[1]:
        raise UserError(f"{settings.path}: both of judge's words are {settings.words[0]!r}; give two.")
    return ids[0][0], ids[1][0]


def _check_head(path: str, tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse weights without a score of one output."""
    if SCORE not in tensors and VALUE_HEAD not in tensors:
        raise UserError(f"{path}: holds no {SCORE}, the head of a reward model; get its weights again.")
    shape = tensors[SCORE].shape if SCORE in tensors else (1,)
    if shape[0] != 1:
        raise UserError(f"{path}: has {shape[0]} labels, and a reward model has one; give one with num_labels 1.")


def read_classifier_adapter(folder: Path) -> tuple[StoredAdapter, dict[str, np.ndarray]]:
    """Read an adapter in PEFT's format that may have a classifier's head.

    Returns the plain adapter, and the head's arrays by name; none if it has no head. Raises UserError.
    """
    raw = read_json(folder / PEFT_CONFIG_FILE)
    file = folder / PEFT_WEIGHTS_FILE
    if raw.get("task_type") != CLASSIFIER or not file.is_file():
        return read_adapter(folder), {}
    kept = sorted(raw.get("modules_to_save") or ["score"])
    plain = raw | {"task_type": None, "modules_to_save": None if kept in HEADS else kept}
    tensors = index_safetensors(file)
    head = {name: tensors.pop(f"{_PEFT}{name}") for name in (SCORE, BIAS) if f"{_PEFT}{name}" in tensors}
    if SCORE in head and head[SCORE].shape[0] != 1:
        found = f"{file}: has {head[SCORE].shape[0]} labels, and a reward model has one"
        raise UserError(f"{found}; train it with num_labels 1.")
    with TemporaryDirectory() as copy:  # the same adapter without its head
        write_json(Path(copy, PEFT_CONFIG_FILE), plain)
        layout = [(name, tensor.shape) for name, tensor in tensors.items()]
        arrays = (tensor.read() for tensor in tensors.values())
        write_safetensors(Path(copy, PEFT_WEIGHTS_FILE), layout, arrays, "float32", {"format": "pt"})
        try:
            stored = read_adapter(copy)
        except UserError as error:
            raise UserError(str(error).replace(copy, str(folder))) from None
    return replace(stored, folder=folder), {name: tensor.read() for name, tensor in head.items()}
