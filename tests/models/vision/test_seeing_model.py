"""A model that sees: logits, log-probs, loss and gradients are the stored ones, tower and adapters included."""

from dataclasses import replace

import numpy as np
import pytest
from mindspore import Tensor, nn
from seeing_model import Seeing
from small_model import SmallModel, random_arrays
from small_updater import RATE, Subject, assert_close

from mindrlhf.backend import native
from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.operators import COMPOSED
from mindrlhf.configs.lora import Adapter
from mindrlhf.images.processor import ImageProcessor
from mindrlhf.models.parameters import parameter_table
from mindrlhf.models.vision.batch import few_sizes
from mindrlhf.models.vision.rows import is_tower
from mindrlhf.training.batch import SequenceGroup, cut, pad
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD

ADAPTER = Adapter(3, 6, target_modules=("qkv", "attn.proj", "merger.mlp.2", "down_proj", "v_proj"))


class Logits(nn.Cell):
    """Logits of completions."""

    def __init__(self, decoder):
        super().__init__(auto_prefix=False)
        self.decoder = decoder

    def construct(self, *inputs):
        return self.decoder.logits(self.decoder.completions(inputs))


def logits_of(model, operators):
    """(groups) -> float32[responses, R, vocab] of each micro-batch."""
    decoder, _ = model.build(operators=operators)
    graph = Logits(decoder)

    def run(groups):
        (batch,) = cut(groups, 1 << 20, 4)
        arrays = pad(batch, groups, pictures=decoder.pictures).model_inputs
        out = graph(*(Tensor(arrays[name]) for name in decoder.inputs)).asnumpy()
        return batch, out.reshape((-1, batch.response_size, out.shape[-1]))

    return run


@pytest.fixture(scope="module")
def run(seeing, fused):
    return logits_of(seeing, fused)


@pytest.fixture(scope="module")
def whole(seeing, run):
    """The stored sequences, and after them the second one with another image of the same size."""
    ids, pictures = seeing.sequences[1]
    mirrored = ImageProcessor(pictures[0].settings).picture(seeing.stored["image_4"][:, ::-1], "here")
    other = SequenceGroup(ids[:1], (np.append(ids[1:], 0).astype(np.int32),), pictures=((), (mirrored,)))
    batch, found = run([*seeing.groups, other])
    return {row: found[place] for place, row in enumerate(batch.groups)}


def test_logits_of_whole_sequences_are_the_stored_ones(seeing, whole):
    for row, (ids, _) in enumerate(seeing.sequences):
        real = seeing.stored["attention_mask"][row] == 1
        stored = seeing.stored["logits"][row][real][:-1]
        np.testing.assert_allclose(whole[row][: len(ids) - 1], stored, rtol=0, atol=5e-5)


def test_equal_ids_with_another_image_have_other_logits(seeing, whole):
    size, stored = len(seeing.sequences[1][0]), seeing.stored["other_image_logits"]
    np.testing.assert_allclose(whole[len(seeing.sequences)][size - len(stored) : size], stored, rtol=0, atol=5e-5)


def test_positions_of_time_alone_are_those_of_text(seeing, fused, whole):
    """With equal rows, sections are ordinary rotary positions: the text model without a tower gives the same."""
    config = seeing.config.model_copy(update={"family": "qwen2", "vision": None})
    text = SmallModel(config, {spec.name: seeing.arrays[spec.name] for spec in seeing.specs if not is_tower(spec)})
    ids, _ = seeing.sequences[0]
    _, theirs = logits_of(text, fused)([SequenceGroup(ids[:1], (ids[1:],))])
    np.testing.assert_allclose(whole[0][: len(ids) - 1], theirs[0, : len(ids) - 1], rtol=0, atol=1e-5)


def test_a_prompt_with_images_is_shared_by_its_answers(seeing, run):
    """The images are in the prompt, which ends in text; the second answer leaves the sequence at once."""
    groups, rows = [], []
    for row, (ids, pictures) in enumerate(seeing.sequences[1:], start=1):
        end = 1 + np.flatnonzero(ids == 593)[-1]  # behind the last image
        answers = ids[end + 1 :], np.array([5, 7], np.int32)
        groups.append(SequenceGroup(ids[: end + 1], answers, pictures=(tuple(pictures), (), ())))
        rows.append((row, end))
    batch, found = run(groups)
    for place, index in enumerate(batch.groups):
        row, end = rows[index]
        stored = seeing.stored["logits"][row][seeing.stored["attention_mask"][row] == 1]
        for sample in range(2):
            known = len(groups[index].responses[0]) if sample == 0 else 1
            own = found[2 * place + sample, :known]
            np.testing.assert_allclose(own, stored[end : end + known], rtol=0, atol=5e-5)


@pytest.fixture(scope="module", params=[pytest.param("composed", marks=pytest.mark.slow), "fused"])
def update(request, seeing):
    """A subject after one update on the stored sequences, and the update."""
    operators = COMPOSED if request.param == "composed" else request.getfixturevalue("fused")
    subject = Subject(seeing, NEGATIVE_LOG_LIKELIHOOD, operators=operators)
    return subject, subject.updater(seeing.groups, RATE, weights=seeing.weights)


def test_log_probs_and_loss_are_the_stored_ones(seeing, update):
    _, found = update
    np.testing.assert_allclose(found.loss, seeing.facts["loss"], rtol=2e-6)
    seeing.check_log_probs(found.outputs)


def test_gradient_norms_of_all_parameters_are_the_stored_ones(seeing, update):
    gradients = update[0].gradients
    assert gradients.keys() == {spec.name for spec in seeing.specs}
    seeing.check_norms(gradients)


def test_whole_gradients_are_the_stored_ones(seeing, update):
    subject, _ = update
    names = {spec.hf_name: spec.name for spec in seeing.specs}
    found = [name.removeprefix("grad/") for name in seeing.stored if name.startswith("grad/")]
    assert any(name.startswith("visual.") for name in found)
    for name in found:
        own, stored = subject.gradients[names[name]], seeing.stored[f"grad/{name}"]
        np.testing.assert_allclose(own, stored, rtol=0, atol=1e-4 * np.abs(stored).max(), err_msg=name)
    special = subject.gradients["model.tok_embeddings.embedding_weight"][592:597]
    stored = seeing.stored["grad_embed_special_rows"]
    np.testing.assert_allclose(special, stored, rtol=0, atol=1e-4 * np.abs(stored).max())


def adapted_model(seeing) -> Seeing:
    """The model whose weights under adapters lack their product, so that both together are the stored ones."""
    config = seeing.config.model_copy(update={"adapter": ADAPTER})
    arrays = random_arrays(config, 3)
    table = {spec.name: spec for spec in parameter_table(config)}
    for name, spec in table.items():
        if not spec.adapts:
            arrays[name] = seeing.arrays[name]
    for name, spec in table.items():
        if spec.kind == "lora_b":
            weight = f"{name.removesuffix('.lora_b')}.weight"
            first = arrays[f"{name.removesuffix('b')}a"]
            arrays[weight] = arrays[weight] - np.float32(spec.scale) * (arrays[name] @ first)
    return replace(seeing, config=config, arrays=arrays)


def test_gradients_of_rounded_products_are_near_the_exact_ones(seeing, update):
    """The worst was 3.6%: they come through the text, whose products are rounded too, and 1.4% of text alone."""
    if not native.library().bfloat16:
        pytest.skip("this processor has no fast bfloat16 products")
    subject = Subject(seeing, NEGATIVE_LOG_LIKELIHOOD, operators=CPU.operators("bfloat16"))
    found = subject.updater(seeing.groups, RATE, weights=seeing.weights)
    assert found.loss == pytest.approx(seeing.facts["loss"], rel=2e-3)
    tower = [spec.name for spec in seeing.specs if is_tower(spec)]
    exact = {name: update[0].gradients[name].astype(np.float64) for name in tower}
    errors = {name: np.linalg.norm(subject.gradients[name] - one) / np.linalg.norm(one) for name, one in exact.items()}
    assert min(errors.values()) > 1e-4
    assert max(errors.values()) < 0.05


@pytest.mark.slow
def test_adapters_have_the_gradients_that_follow_from_their_weights(seeing, update):
    """With W + s B A: dA = s B^T dW and dB = s dW A^T."""
    model, whole = adapted_model(seeing), update[0].gradients
    subject = Subject(model, NEGATIVE_LOG_LIKELIHOOD)
    seeing.check_log_probs(subject.updater(seeing.groups, RATE, weights=seeing.weights).outputs)
    gradients = subject.gradients
    specs = [spec for spec in model.specs if spec.kind == "lora_b"]
    assert {spec.name.split(".")[-2] for spec in specs} == {"qkv", "proj", "2", "down_proj", "w2", "wv"}
    assert any(is_tower(spec) for spec in specs)
    assert gradients.keys() == {f"{spec.name.removesuffix('b')}{kind}" for spec in specs for kind in "ab"}
    for spec in specs:
        name = spec.name.removesuffix(".lora_b")
        first, second = (model.arrays[f"{name}.lora_{kind}"].astype(np.float64) for kind in "ab")
        slope = spec.scale * whole[f"{name}.weight"].astype(np.float64)
        assert_close(gradients[f"{name}.lora_a"], second.T @ slope, 1e-4, name)
        assert_close(gradients[f"{name}.lora_b"], slope @ first.T, 1e-4, name)


def test_few_sizes_serve_all_numbers():
    assert [few_sizes(number) for number in (0, 1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 49)] == [
        *(1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64),
    ]
    assert all(number <= few_sizes(number) < 1.5 * number + 1 for number in range(1, 500))
    assert len({few_sizes(number) for number in range(1, 1025)}) == 20
