"""A model that sees: logits, log-probs, loss and gradient norms are the stored ones, tower included."""

import numpy as np
import pytest
from mindspore import Tensor, nn
from small_model import SmallModel
from small_updater import RATE, Subject

from mindrlhf.backend.operators import COMPOSED
from mindrlhf.images.processor import ImageProcessor
from mindrlhf.models.vision.batch import few_sizes
from mindrlhf.models.vision.rows import is_tower
from mindrlhf.training.batch import SequenceGroup, cut, pad
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD


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


def test_few_sizes_serve_all_numbers():
    assert [few_sizes(number) for number in (0, 1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 49)] == [
        *(1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64),
    ]
    assert all(number <= few_sizes(number) < 1.5 * number + 1 for number in range(1, 500))
    assert len({few_sizes(number) for number in range(1, 1025)}) == 20
