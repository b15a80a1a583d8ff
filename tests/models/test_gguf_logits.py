"""Logits of models from GGUF files against float64 NumPy on the weights as the package `gguf` dequantises them."""

import gguf_files
import numpy as np
import pytest
import reference_model
from slow_cases import few_of
from small_model import SmallModel
from whole_sequences import compiled_logits

from mindrlhf.checkpoint.hf_tensors import split
from mindrlhf.checkpoint.local import local_model
from mindrlhf.checkpoint.weights import Weights, checkpoint_config
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.parameters import parameter_table

FAMILIES = {
    "llama": {"family": "llama", "attention_bias": False, "tie_word_embeddings": True},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "attention_bias": False, "qk_norm": True, "num_heads": 8, "head_dim": 32},
    "qwen3_moe": gguf_files.EXPERTS,
}
IDS = np.random.default_rng(5).integers(0, 320, (1, 24))


@pytest.fixture(scope="module")
def logits():
    """Compiles each architecture once: (config, arrays) -> float32[24, vocab]."""
    known = {}

    def run(config: ModelConfig, arrays) -> np.ndarray:
        from mindspore import Tensor

        if config.family not in known:
            model = SmallModel(config, arrays)
            built = []

            class Kept(SmallModel):
                def build(self, **options):
                    built.append(super().build(**options))
                    return built[0]

            known[config.family] = compiled_logits(Kept(config, model.arrays)), built[0][1]
        graph, parameters = known[config.family]
        for name, array in arrays.items():
            parameters[name].set_data(Tensor(array))
        return graph(IDS)[0]

    return run


PAIRS = [(family, kind) for kind in gguf_files.TYPES for family in FAMILIES]
# Each type in one family, and each family in several types.
FEW = [(family, kind) for family, kind in PAIRS if [*gguf_files.TYPES].index(kind) % 4 == [*FAMILIES].index(family)]


@pytest.mark.parametrize(("family", "kind"), few_of(FEW, [pair for pair in PAIRS if pair not in FEW]))
def test_logits_are_those_of_the_dequantised_weights(tmp_path, logits, family, kind):
    config = gguf_files.wide_config(**FAMILIES[family])
    arrays = gguf_files.write_gguf(tmp_path / "model.gguf", config, kind)
    folder = local_model(str(tmp_path / "model.gguf"))
    found = checkpoint_config(folder)
    assert {key: value for key, value in found if key not in ("eos_token_ids", "pad_token_id")} == {
        key: value for key, value in config if key not in ("eos_token_ids", "pad_token_id")
    }
    read = Weights(folder, found, 0).reader()
    stored = {spec.name: read(spec) for spec in parameter_table(found)}
    for name, array in arrays.items():
        np.testing.assert_array_equal(stored[name], array, err_msg=name)
    tensors = {name: array for s in parameter_table(found) for name, array in split(s, arrays[s.name])}
    expected = reference_model.logits(found, tensors, IDS[0])
    assert expected.std() > 0.5
    np.testing.assert_allclose(logits(found, stored), expected, rtol=0, atol=1e-4)
