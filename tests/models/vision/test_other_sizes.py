"""Models that see of other sizes than the stored one: values and slopes of the float64 oracle."""

import numpy as np
import pytest
import reference_tower
from mindspore import Tensor, nn
from slow_cases import few_of
from small_model import SmallModel, log_softmax
from small_updater import Subject, assert_close, rows_like

from mindrlhf.configs.images import ImageSettings
from mindrlhf.configs.vision import VisionConfig
from mindrlhf.images.processor import ImageProcessor
from mindrlhf.models.vision.rows import is_tower
from mindrlhf.training.batch import SequenceGroup, cut, pad
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD

PAD = 60
SIZES = {
    # Squares of nine patches, one frame, windows of two tokens, heads of 8; one whole block.
    "nine patches a token": (
        {"depth": 3, "hidden_size": 24, "num_heads": 3, "patch_size": 4, "merge_size": 3, "temporal_patch_size": 1},
        {"window_size": 30, "intermediate_size": 20, "full_attention_blocks": (1,), "sections": (1, 2, 1)},
    ),
    # One patch a token, windows of three tokens, and five sections.
    "one patch a token": (
        {"depth": 2, "hidden_size": 16, "num_heads": 4, "patch_size": 6, "merge_size": 1, "temporal_patch_size": 3},
        {"window_size": 18, "intermediate_size": 12, "full_attention_blocks": (), "sections": (1, 1, 1, 1)},
    ),
    # One layer of everything.
    "least": (
        {"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 6, "merge_size": 2, "temporal_patch_size": 2},
        {"window_size": 24, "intermediate_size": 12, "full_attention_blocks": (0,), "sections": (2, 1, 1)},
    ),
}
SHAPES = [(17, 40), (30, 12), (12, 12)]


def small_model(name, **changes):
    sizes, more = SIZES[name]
    vision = VisionConfig(image_token_id=PAD, **sizes, **more)
    return SmallModel.random(3, family="qwen2_5_vl", vision=vision, rope_theta=100.0, **changes)


@pytest.fixture(scope="module", params=few_of(["nine patches a token"], ["one patch a token"]))
def model(request):
    return small_model(request.param)


@pytest.fixture(scope="module")
def least():
    return small_model("least", num_layers=1)


@pytest.fixture(scope="module")
def pictures(model):
    return random_pictures(model)


def random_pictures(model, shapes=SHAPES):
    vision = model.config.vision
    sizes = {"patch_size": vision.patch_size, "merge_size": vision.merge_size}
    frames = {"temporal_patch_size": vision.temporal_patch_size}
    processor = ImageProcessor(ImageSettings(min_pixels=144, max_pixels=2000, **sizes, **frames))
    rng = np.random.default_rng(2)
    return [processor.picture(rng.integers(0, 256, (*shape, 3), np.uint8), "here") for shape in shapes]


def sequence(pictures, before):
    """Ids of texts with each picture's tokens between them."""
    rng = np.random.default_rng(before)
    parts = [rng.integers(0, PAD, before)]
    for picture in pictures:
        parts += [np.full(picture.tokens, PAD), rng.integers(0, PAD, 3)]
    return np.concatenate(parts).astype(np.int32)


@pytest.fixture(scope="module")
def groups(pictures):
    return groups_of(pictures)


def groups_of(pictures):
    """A text, a picture in a prompt with two answers, and two pictures of which one is behind the prompt."""
    first, second, third = pictures
    prompt, answer = sequence([first], 2), sequence([third], 1)
    return [
        SequenceGroup(sequence([], 4), (sequence([], 5), sequence([], 2))),
        SequenceGroup(prompt, (sequence([], 4), sequence([], 3)), pictures=((first,), (), ())),
        SequenceGroup(sequence([second], 1), (answer, sequence([], 1)), pictures=((second,), (third,), ())),
    ]


def oracle(model, group, sample, arrays=None):
    """float64[R] of the oracle: log p of each token of a response."""
    ids = np.concatenate([group.prompt_ids, group.responses[sample]])
    pictures = [*group.pictures[0], *group.pictures[1 + sample]] if group.pictures else []
    shown = [(picture.patches(), picture.grid) for picture in pictures]
    found = log_softmax(
        reference_tower.logits(model.config, model.merged(model.arrays | (arrays or {})), ids[:-1], shown)
    )
    rows = found[len(group.prompt_ids) - 1 :]
    return rows[np.arange(len(rows)), group.responses[sample]]


def loss(model, groups, weights, arrays=None):
    return -sum(
        (weight * oracle(model, group, sample, arrays)).sum()
        for group, own in zip(groups, weights, strict=True)
        for sample, weight in enumerate(own)
    )


@pytest.fixture(scope="module")
def update(model, groups):
    subject = Subject(model, NEGATIVE_LOG_LIKELIHOOD, bucket=8)
    weights = rows_like(groups, np.random.default_rng(5).standard_normal)
    return subject, weights, subject.updater(groups, 0.0, weights=weights)


def test_log_probs_are_the_oracle_s(model, groups, update):
    _, _, found = update
    for index, group in enumerate(groups):
        for sample in range(2):
            np.testing.assert_allclose(found.outputs[index][sample], oracle(model, group, sample), rtol=0, atol=2e-5)


def test_gradients_are_slopes_of_the_oracle(model, groups, update):
    """The oracle's loss in float64, moved a little along one random direction for each parameter of the tower."""
    subject, weights, _ = update
    rng = np.random.default_rng(7)
    tower = [spec for spec in model.specs if is_tower(spec)]
    assert len(tower) == 1 + 12 * model.config.vision.depth + 5
    for spec in tower:
        direction, value = rng.standard_normal(spec.shape), model.arrays[spec.name].astype(np.float64)
        high, low = (loss(model, groups, weights, {spec.name: value + step * direction}) for step in (1e-6, -1e-6))
        gradient = subject.gradients[spec.name].astype(np.float64)
        error = 2e-5 * np.linalg.norm(gradient) * np.linalg.norm(direction)
        np.testing.assert_allclose(
            (gradient * direction).sum(), (high - low) / 2e-6, rtol=0, atol=error, err_msg=spec.name
        )


class Prefill(nn.Cell):
    """Keys and values of prompts."""

    def __init__(self, decoder):
        super().__init__(auto_prefix=False)
        self.decoder = decoder

    def construct(self, ids, positions, *further):
        return self.decoder.prefill(ids, positions, *further)


@pytest.mark.slow
def test_prompts_with_images_have_the_same_keys_alone_and_beside_others(least):
    """Prefilling sees as training does: its keys depend on the prompt's own images alone."""
    decoder, _ = least.build()
    groups = groups_of(random_pictures(least))
    graph = Prefill(decoder)

    def keys(some):
        (batch,) = cut(some, 1 << 20, 8)
        arrays = pad(batch, some, pictures=decoder.pictures).model_inputs
        n, p = arrays["prefix_ids"].shape
        names = ("positions", *decoder.inputs[5:8])
        rows = [Tensor(np.ascontiguousarray(arrays[name][: n * p])) for name in names]
        found = graph(Tensor(arrays["prefix_ids"]), *rows, *(Tensor(arrays[name]) for name in decoder.inputs[8:]))
        lengths = arrays["prefix_lengths"]
        return {
            index: [key.asnumpy()[place][:, : lengths[place]] for key in found[::2]]
            for place, index in enumerate(batch.groups)
        }

    together, alone = keys(groups), keys(groups[1:2])
    for ours, theirs in zip(together[1], alone[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    mirrored = groups[1].pictures[0][0]
    swapped = ImageProcessor(mirrored.settings).picture(mirrored.pixels[::-1], "here")
    other = SequenceGroup(groups[1].prompt_ids, groups[1].responses, pictures=((swapped,), (), ()))
    assert max(np.abs(a - b).max() for a, b in zip(keys([other])[0], alone[0], strict=True)) > 1e-2


@pytest.mark.slow
def test_text_alone_gives_the_tower_no_gradient_and_is_an_update(least):
    subject = Subject(least, NEGATIVE_LOG_LIKELIHOOD)
    groups = [SequenceGroup(sequence([], 4), (sequence([], 5),))]
    found = subject.updater(groups, 0.0, weights=rows_like(groups, np.ones))
    assert np.isfinite(found.loss)
    for spec in least.specs:
        assert subject.gradients[spec.name].any() != is_tower(spec), spec.name


@pytest.mark.slow
def test_micro_batches_add_up(least):
    pictures = random_pictures(least, [(30, 20), (20, 30)])
    groups = [SequenceGroup(sequence([one], 2), (sequence([], 5),), pictures=((one,), ())) for one in pictures]
    weights = rows_like(groups, np.random.default_rng(5).standard_normal)
    subject = Subject(least, NEGATIVE_LOG_LIKELIHOOD, max_tokens=40, bucket=16)

    def gradients(*rows):
        chosen = [groups[row] for row in rows]
        assert len(cut(chosen, 40, 16)) == len(rows)
        subject.updater(chosen, 0.0, weights=[weights[row] for row in rows])
        return dict(subject.gradients)

    together, first, second = gradients(0, 1), gradients(0), gradients(1)
    for name, gradient in together.items():
        assert first[name].any(), name
        assert second[name].any(), name
        assert_close(gradient, first[name].astype(np.float64) + second[name], 1e-6, name)
