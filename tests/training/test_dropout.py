"""Updates with dropout of adapters' inputs: against the oracle, for any cut, after a resume, and nowhere else."""

from dataclasses import replace

import numpy as np
import pytest
import reference_model
from dropped_weight import DroppedWeight, mask
from small_model import SmallModel, log_softmax

from mindrlhf import backend
from mindrlhf.configs.grpo import OptimizerSettings, TrainSettings
from mindrlhf.configs.lora import Adapter
from mindrlhf.models.dropout import InputDropout
from mindrlhf.random_numbers import random_keys
from mindrlhf.training.batch import SequenceGroup, cut, pad
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD
from mindrlhf.training.optimizer import AdamW
from mindrlhf.training.scoring import Scorer
from mindrlhf.training.updater import Updater

SHARE, SEED, VOCABULARY = 0.3, 5, 32
ADAPTER = Adapter(4, 8, exclude_modules=("k_proj", "gate_proj"), rank_pattern={"down_proj": 3}, dropout=SHARE)
LENGTHS = [(7, (4, 9)), (1, (6, 1)), (5, (2, 8))]
WHOLE, SINGLES = 16384, 1


class Subject:
    """An updater of updates with dropout; `gradients` holds what its last update applied, by name."""

    def __init__(self, model, max_tokens=WHOLE, bucket=4):
        self.decoder, self.parameters = model.build(for_updates=True)
        trained = [spec for spec in model.specs if spec.trains]
        settings = OptimizerSettings(eps=1e-5, max_grad_norm=0.0)
        self.optimizer = AdamW(settings, [self.parameters[spec.name] for spec in trained], trained)
        self.train = TrainSettings(max_tokens_per_micro_batch=max_tokens, length_bucket=bucket)
        self.gradients = {}
        given = (PolicyLogProbs(self.decoder, 1.0), NEGATIVE_LOG_LIKELIHOOD, self.optimizer, self.train, self._keep)
        self.updater = Updater(*given, seed=SEED)

    def _keep(self):
        """Stands where ranks sum their gradients."""
        for parameter, buffer in zip(self.optimizer.parameters, self.optimizer.gradients, strict=True):
            self.gradients[parameter.name] = np.array(buffer.asnumpy())

    def state(self) -> list[np.ndarray]:
        """Copies of all that a checkpoint has but the counter."""
        kept = (self.optimizer.parameters, self.optimizer.first, self.optimizer.second)
        return [np.array(parameter.asnumpy()) for group in kept for parameter in group]

    def restore(self, state: list[np.ndarray]) -> None:
        kept = (*self.optimizer.parameters, *self.optimizer.first, *self.optimizer.second)
        for parameter, array in zip(kept, state, strict=True):
            backend.write(parameter, array)


@pytest.fixture(scope="module")
def model():
    return SmallModel.random(4, num_layers=1, vocab_size=VOCABULARY, adapter=ADAPTER)


@pytest.fixture(scope="module")
def groups():
    rng = np.random.default_rng(0)
    ids = lambda count: rng.integers(0, VOCABULARY, count).astype(np.int32)  # noqa: E731
    return [
        SequenceGroup(ids(prompt), tuple(ids(length) for length in responses), identity=(11 * number, 0))
        for number, (prompt, responses) in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def weights(groups):
    rng = np.random.default_rng(5)
    return [tuple(rng.standard_normal(len(response)) for response in group.responses) for group in groups]


@pytest.fixture(scope="module")
def subject(model):
    return Subject(model)


def oracle_log_probs(model, group, sample: int, update: int, changed) -> np.ndarray:
    """float64[R], with the adapters' products of what the update's masks leave."""
    arrays, response, start = model.arrays | changed, group.responses[sample], len(group.prompt_ids)
    ids = np.concatenate([group.prompt_ids, response[:-1]])
    # Of a prompt all but the last token are shared by its samples.
    samples, positions = np.where(np.arange(len(ids)) < start - 1, 0, sample + 1), np.arange(len(ids))
    rows = random_keys(SEED, update, *group.identity, samples, positions)
    tensors = {spec.hf_name: arrays[spec.name] for spec in model.specs if not spec.adapts}
    for spec in model.specs:
        if spec.kind == "lora_b":
            name, base = spec.name.removesuffix(".lora_b"), f"{spec.hf_tensors[0].module}.weight"
            a, b = (arrays[f"{name}.{matrix}"] for matrix in ("lora_a", "lora_b"))
            kept = mask(rows, name, SHARE, a.shape[1])
            tensors[base] = DroppedWeight.of(tensors[base], a, b, spec.scale / (1 - SHARE), kept)
    rows = log_softmax(reference_model.logits(model.config, tensors, ids))[start - 1 :]
    return rows[np.arange(len(response)), response]


def test_gradients_are_slopes_of_the_oracle_with_the_same_masks(model, groups, weights, subject):
    subject.optimizer.updates = 6
    update = subject.updater(groups, 0.0, weights=weights)
    gradients, rng = dict(subject.gradients), np.random.default_rng(1)

    def loss(changed):
        return -sum(
            (weight * oracle_log_probs(model, group, sample, 6, changed)).sum()
            for group, of_group in zip(groups, weights, strict=True)
            for sample, weight in enumerate(of_group)
        )

    plain = [model.log_probs(groups[0].prompt_ids, response) for response in groups[0].responses]
    assert np.abs(update.outputs[0][1] - plain[1]).max() > 0.05
    np.testing.assert_allclose(update.outputs[0][1], oracle_log_probs(model, groups[0], 1, 6, {}), rtol=0, atol=2e-5)
    np.testing.assert_allclose(update.loss, loss({}), rtol=1e-5)
    for kind in ("lora_a", "lora_b"):
        for layer in range(model.config.num_layers):
            specs = [spec for spec in model.specs if spec.kind == kind and spec.layer == layer]
            assert len(specs) == 5
            directions = {spec.name: rng.standard_normal(spec.shape) for spec in specs}
            ahead, behind = (
                loss({name: model.arrays[name].astype(np.float64) + step * one for name, one in directions.items()})
                for step in (1e-6, -1e-6)
            )
            found = sum((gradients[name].astype(np.float64) * one).sum() for name, one in directions.items())
            size = np.sqrt(sum((gradients[name].astype(np.float64) ** 2).sum() for name in directions))
            norm = np.sqrt(sum((one**2).sum() for one in directions.values()))
            np.testing.assert_allclose(found, (ahead - behind) / 2e-6, rtol=0, atol=1e-5 * size * norm)


@pytest.mark.slow
def test_any_cut_gives_the_same_gradients(model, groups, weights, subject):
    subject.optimizer.updates = 2
    expected, whole = subject.updater(groups, 0.0, weights=weights), dict(subject.gradients)
    pieces = Subject(model, SINGLES, 16)
    assert len(cut(groups, SINGLES, 16)) == 3
    pieces.optimizer.updates = 2
    order = [2, 0, 1]  # as another rank may have them
    update = pieces.updater([groups[i] for i in order], 0.0, weights=[weights[i] for i in order])
    np.testing.assert_allclose(update.loss, expected.loss, rtol=1e-6)
    for name, gradient in whole.items():
        difference = np.linalg.norm(pieces.gradients[name].astype(np.float64) - gradient)
        assert gradient.any()
        assert difference <= 2e-6 * np.linalg.norm(gradient), name


def test_a_resumed_run_draws_the_same_masks(groups, weights, subject):
    """All that a checkpoint keeps is enough; without the counter it is not."""
    first = subject.state()
    subject.optimizer.updates = 0
    subject.updater(groups, 1e-3, weights=weights)
    between, counters = subject.state(), subject.optimizer.state_dict()
    subject.updater(groups, 1e-3, weights=weights)
    expected = subject.state()
    for state, same in ((counters, True), ({"updates": 0}, False)):
        subject.restore(between)
        subject.optimizer.load_state_dict(state)
        subject.updater(groups, 1e-3, weights=weights)
        pairs = zip(subject.state(), expected, strict=True)
        assert same == all(one.tobytes() == other.tobytes() for one, other in pairs)
    subject.restore(first)


def test_other_graphs_drop_nothing(model, groups, subject):
    """Log-probs of a decoder that is not for updates, as the oracle gives them; without dropout there is no mask."""
    decoder, _ = model.build()
    scores = Scorer(PolicyLogProbs(decoder, 1.0), subject.train)(groups)
    for group, rows in zip(groups, scores, strict=True):
        for response, row in zip(group.responses, rows, strict=True):
            np.testing.assert_allclose(row, model.log_probs(group.prompt_ids, response), rtol=0, atol=2e-5)
    without = replace(ADAPTER, dropout=0.0)
    same = SmallModel(model.config.model_copy(update={"adapter": without}), model.arrays).build(for_updates=True)[0]
    assert same.fused == decoder.fused
    for one, drops in ((decoder, False), (same, False), (subject.decoder, True)):
        masks = sum(isinstance(cell, InputDropout) for _, cell in one.cells_and_names())
        assert (one.drops, masks) == (drops, 5 * drops)
    (micro,) = cut(groups, WHOLE, 4)
    assert "dropout_keys" not in pad(micro, groups).model_inputs
    assert pad(micro, groups, draw=(SEED, 0)).model_inputs["dropout_keys"].shape == (micro.rows,)
