"""MindFormers' own model as a second opinion, where it is installed.

It computes log-probs, loss and gradients of a tiny Qwen2 model, with its fused attention and norms on a device and its
compositions on CPU. It is compared with float64, and ours with it, so that a difference says whose it is.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import mindspore
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from mindrlhf.acceptance.checks import TOLERANCES, Check, Finding, Trial
from mindrlhf.acceptance.facts import ORACLE
from mindrlhf.acceptance.inputs import tiny_models, tiny_weights, whole_numbers
from mindrlhf.acceptance.layers import TEMPERATURE
from mindrlhf.acceptance.models import Pass, compared_passes, exact_pass, own_update
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.families import DEFAULT
from mindrlhf.training.batch import SequenceGroup

ROWS, LENGTH = 2, 24


class _Loss(nn.Cell):
    """Mean of -log p over all tokens but each row's first, and log-probs."""

    def __init__(self, model: nn.Cell, ids: np.ndarray):
        super().__init__(auto_prefix=False)
        self.model = model
        self.targets = Tensor(ids[:, 1:].reshape(-1, 1))

    def construct(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(ids)[0]
        logits = ops.cast(logits, mindspore.float32).reshape(ROWS, LENGTH, -1)[:, :-1] / TEMPERATURE
        every = ops.log_softmax(logits.reshape(ROWS * (LENGTH - 1), -1), axis=-1)
        log_probs = ops.gather_d(every, 1, self.targets)
        return -log_probs.mean(), log_probs


def theirs(config: ModelConfig, weights: Mapping[str, np.ndarray], ids: np.ndarray, dtype: str, fused: bool) -> Pass:
    """Compute the pass by MindFormers' `LlamaForCausalLM`. fused: with its operators for a device."""
    library = import_module(ORACLE)
    settings = library.LlamaConfig(
        batch_size=ROWS,
        seq_length=LENGTH,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        n_kv_heads=config.num_kv_heads,
        qkv_has_bias=config.attention_bias,
        rms_norm_eps=config.rms_norm_eps,
        theta=config.rope_theta,
        tie_word_embeddings=config.tie_word_embeddings,
        max_position_embedding=config.max_position_embeddings,
        pad_token_id=config.vocab_size - 1,
        use_rope_slice=True,
        use_past=False,
        is_dynamic=False,
        qkv_concat=False,
        use_flash_attention=fused,
        fused_rms_norm=fused,
        compute_dtype=dtype,
        layernorm_compute_type="float32",
        softmax_compute_type="float32",
        rotary_dtype="float32",
        param_init_type="float32",
        embedding_init_type="float32",
    )
    network = library.LlamaForCausalLM(settings)
    network.set_train(False)
    mindspore.load_param_into_net(network, {name: Parameter(array, name=name) for name, array in weights.items()})
    trained = [one for one in network.get_parameters() if one.name in weights]
    if lost := weights.keys() - {one.name for one in trained}:
        raise ValueError(f"{ORACLE}'s model has no weight {min(lost)}")
    compute = mindspore.value_and_grad(_Loss(network, ids), None, ParameterTuple(trained), has_aux=True)
    (loss, log_probs), slopes = compute(Tensor(ids))
    found = {one.name: slope.asnumpy() for one, slope in zip(trained, slopes, strict=True)}
    return Pass(log_probs.asnumpy().reshape(-1), loss.asnumpy(), found)


def check_oracle(dtype: str, trial: Trial) -> Iterator[Finding]:
    """Compare MindFormers' model with float64, and ours with it."""
    os.environ.setdefault("LOCAL_DEFAULT_PATH", str(trial.folder / ORACLE))  # where its import makes a folder of logs
    config = tiny_models()[DEFAULT.name]
    weights = tiny_weights(config, DEFAULT.name)
    ids = whole_numbers(f"{ORACLE} ids", config.vocab_size - 1, ROWS * LENGTH).reshape(ROWS, LENGTH)
    groups = [SequenceGroup(row[:1], (row[1:],)) for row in ids]
    known = theirs(config, weights, ids, dtype, fused=not trial.device.in_host_memory)
    tolerance = TOLERANCES[dtype]["model"]
    yield from compared_passes("MindFormers and float64: ", known, exact_pass(config, weights, groups), tolerance)
    own, _ = own_update(config, weights, groups, dtype, trial)
    yield from compared_passes("ours and MindFormers: ", own, known, 2 * tolerance)


def oracle_checks(dtypes: Sequence[str]) -> Iterator[Check]:
    """List the checks against MindFormers; none where it is not installed.

    dtypes: of activations, because its model computes in one dtype.
    """
    if find_spec(ORACLE):
        for dtype in dtypes:
            yield Check(f"{DEFAULT.name} beside MindFormers {dtype}", "model", partial(check_oracle, dtype))
