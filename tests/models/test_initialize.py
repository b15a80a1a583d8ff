"""Random weights, and parameters from whatever reads them."""

import numpy as np
import pytest
from small_model import small_config

from mindrlhf.configs.lora import Adapter
from mindrlhf.models.initialize import build_parameters, random_tensor
from mindrlhf.models.parameters import parameter_table

CONFIG = small_config(vocab_size=512, hidden_size=64, initializer_range=0.05, family="qwen3", qk_norm=True)
SPECS = {spec.name: spec for spec in parameter_table(CONFIG)}
MATRICES = [spec for spec in SPECS.values() if spec.kind in ("matrix", "embedding", "head")]


def test_each_kind_starts_as_in_hf():
    for spec in SPECS.values():
        values = random_tensor(spec, CONFIG, 0)
        assert values.dtype == np.float32
        assert values.shape == spec.shape
        if spec.kind == "norm":
            assert (values == 1).all()
        elif spec.kind == "bias":
            assert (values == 0).all()
    assert {spec.kind for spec in SPECS.values()} == {"matrix", "bias", "norm", "embedding", "head"}


def test_matrices_are_normal_with_the_configured_width():
    for spec in MATRICES:
        values = random_tensor(spec, CONFIG, 7) / CONFIG.initializer_range
        errors = 5 / np.sqrt(spec.size)  # five standard errors of the mean
        assert abs(values.mean()) < errors
        assert abs(values.std() - 1) < errors
        assert abs((np.abs(values) > 1.959964).mean() - 0.05) < errors  # a uniform distribution has none out there


@pytest.mark.parametrize("init", ["kaiming", "gaussian"])
def test_an_adapter_begins_as_in_peft(init):
    config = CONFIG.model_copy(update={"adapter": Adapter(32, 1, init=init)})
    for spec in parameter_table(config):
        if spec.kind == "lora_b":
            assert not random_tensor(spec, config, 7).any()
        if spec.kind == "lora_a":
            values, errors = random_tensor(spec, config, 7), 5 / np.sqrt(spec.size)
            assert values.dtype == np.float32
            width = 1 / 32 if init == "gaussian" else 1 / np.sqrt(3 * spec.shape[1])
            assert abs(values.mean() / width) < errors
            assert abs(values.std() / width - 1) < errors
            largest = np.abs(values).max() / width
            assert (largest > 2) if init == "gaussian" else (1.7 < largest <= np.sqrt(3) * (1 + 1e-6))


def test_a_tensor_depends_on_seed_and_name_alone():
    spec = SPECS["model.layers.1.attention.wq.weight"]
    first = random_tensor(spec, CONFIG, 3)
    for other in MATRICES:
        random_tensor(other, CONFIG, 4)
    np.testing.assert_array_equal(random_tensor(spec, CONFIG, 3), first)
    others = [random_tensor(spec, CONFIG, 4), random_tensor(SPECS["model.layers.0.attention.wq.weight"], CONFIG, 3)]
    for other in others:
        assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 5 / np.sqrt(spec.size)


@pytest.mark.parametrize("seed", [2**31, 2**32 - 1, 2**40])
def test_large_seeds(seed):
    spec = MATRICES[0]
    assert not np.array_equal(random_tensor(spec, CONFIG, seed), random_tensor(spec, CONFIG, 0))


def test_parameters_hold_what_was_read():
    rng = np.random.default_rng(0)
    # As a reader may give them: transposed views and float16.
    stored = {name: rng.normal(size=spec.shape[::-1]).astype(np.float16).T for name, spec in SPECS.items()}
    parameters = build_parameters(parameter_table(CONFIG), lambda spec: stored[spec.name])
    assert list(parameters) == list(SPECS)
    for name, parameter in parameters.items():
        assert parameter.name == name
        assert parameter.requires_grad
        assert parameter.asnumpy().dtype == np.float32
        np.testing.assert_array_equal(parameter.asnumpy(), stored[name])


def test_parameters_do_not_share_memory_with_what_was_read():
    stored = {name: np.zeros(spec.shape, np.float32) for name, spec in SPECS.items()}
    parameters = build_parameters(parameter_table(CONFIG), lambda spec: stored[spec.name])
    for name, parameter in parameters.items():
        parameter.asnumpy()[...] = 1
        assert (stored[name] == 0).all()
