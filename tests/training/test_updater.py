"""One update, from sequences to weights, against whole sequences and other cuts."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from slow_cases import few_of
from small_model import SmallModel, log_softmax
from small_updater import (
    BETA,
    LENGTHS,
    OPTIMIZER,
    RATE,
    TEMPERATURE,
    Subject,
    assert_close,
    clip_and_kl,
    random_groups,
    rows_like,
)
from whole_sequences import whole_sequences

from mindrlhf import backend
from mindrlhf.backend.compile.graph import compile_seconds
from mindrlhf.backend.operators import COMPOSED
from mindrlhf.configs.grpo import OptimizerSettings, SamplingSettings
from mindrlhf.rollout.engine import Engine
from mindrlhf.training.batch import SequenceGroup, cut
from mindrlhf.training.passes import Gradients
from mindrlhf.types import Prompt

WHOLE, HALVES, SINGLES = 16384, 160, 1


class Step:
    """The inputs of a GRPO update on `LENGTHS`, off policy, with a reference model that differs."""

    def __init__(self, model):
        rng = np.random.default_rng(1)
        self.groups = random_groups()
        exact = [tuple(model.log_probs(g.prompt_ids, r, TEMPERATURE) for r in g.responses) for g in self.groups]
        self.rows = {
            "weights": rows_like(self.groups, lambda n: rng.uniform(0.01, 0.05, n)),
            "advantages": rows_like(self.groups, lambda n: np.full(n, rng.normal())),
            "old_log_probs": [tuple(row + rng.normal(size=len(row)) * 0.2 for row in rows) for rows in exact],
            "reference_log_probs": [tuple(row + rng.normal(size=len(row)) * 0.3 for row in rows) for rows in exact],
        }
        self.exact = exact

    def run(self, subject, **options):
        return subject.updater(self.groups, RATE, **self.rows, **options)


@pytest.fixture(scope="module")
def model():
    return SmallModel.random(6)


@pytest.fixture(scope="module")
def step(model):
    return Step(model)


@pytest.fixture(scope="module")
def whole(model, step):
    """(subject, its one update) with all groups in one micro-batch."""
    subject = Subject(model, clip_and_kl(), TEMPERATURE, moves=True)
    return subject, step.run(subject)


@pytest.fixture(scope="module")
def plain(model, step):
    """Loss, log-probs [B, R], gradients by name of the form in which each row is a whole sequence."""
    import mindspore
    from mindspore import ParameterTuple, Tensor, nn, ops

    class Plain(nn.Cell):
        def __init__(self, decoder, objective):
            super().__init__(auto_prefix=False)
            self.decoder, self.losses = decoder, objective.losses

        def construct(self, ids, positions, targets, mask, weights, advantages, old, reference):
            hidden = ops.gather(whole_sequences(self.decoder, ids), positions.reshape((-1,)), 0)
            log_probs = ops.log_softmax(self.decoder.logits(hidden) / TEMPERATURE, -1)
            log_probs = ops.gather_d(log_probs, 1, targets.reshape((-1, 1))).reshape(targets.shape)
            losses, _ = self.losses((log_probs, log_probs), mask, advantages, old, reference)
            return (losses * weights).sum(), log_probs

    decoder, parameters = model.build(operators=COMPOSED)
    names = list(parameters)
    gradient = ops.value_and_grad(
        Plain(decoder, clip_and_kl()), None, ParameterTuple([parameters[name] for name in names]), has_aux=True
    )

    @mindspore.jit
    def graph(*inputs):
        return gradient(*inputs)

    pairs = [(group.prompt_ids, response) for group in step.groups for response in group.responses]
    size = max(len(prompt) + len(response) for prompt, response in pairs)
    longest = max(len(response) for _, response in pairs)
    ids = np.zeros((len(pairs), size), np.int32)
    positions, targets, mask, *fields = (np.zeros((len(pairs), longest)) for _ in range(7))
    for row, (prompt, response) in enumerate(pairs):
        ids[row, : len(prompt) + len(response)] = np.concatenate([prompt, response])
        here = slice(0, len(response))
        positions[row, here] = row * size + len(prompt) - 1 + np.arange(len(response))
        targets[row, here], mask[row, here] = response, 1
        for field, values in zip(fields, step.rows.values(), strict=True):
            field[row, here] = values[row // 2][row % 2]
    whole_numbers = [Tensor(array.astype(np.int32)) for array in (ids, positions, targets)]
    (loss, log_probs), gradients = graph(
        *whole_numbers, *(Tensor(array.astype(np.float32)) for array in (mask, *fields))
    )
    return float(loss.asnumpy()), log_probs.asnumpy(), dict(zip(names, (g.asnumpy() for g in gradients), strict=True))


def test_a_shared_prompt_gives_what_whole_sequences_give(model, step, whole, plain):
    subject, update = whole
    loss, log_probs, gradients = plain
    np.testing.assert_allclose(update.loss, loss, rtol=1e-5)
    flat = [row for rows in update.outputs for row in rows]
    for row, expected in zip(flat, log_probs, strict=True):
        np.testing.assert_allclose(row, expected[: len(row)], rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        assert_close(subject.gradients[name], gradient, 1e-5, name)
    # The first update of AdamW from those gradients, in float64: Kingma & Ba 2015 with m = g, v = g^2.
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values()))
    np.testing.assert_allclose(update.result.grad_norm, norm, rtol=1e-5)
    decaying = {spec.name for spec in model.specs if spec.decays}
    for name, weight in subject.weights().items():
        start, gradient = model.arrays[name].astype(np.float64), gradients[name].astype(np.float64) / max(1.0, norm)
        decay = OPTIMIZER.weight_decay * start if name in decaying else 0.0
        expected = start - RATE * (gradient / (np.abs(gradient) + OPTIMIZER.eps) + decay)
        assert np.abs(expected - start).max() > 0.9 * RATE
        np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-5 * np.abs(start).max(), err_msg=name)


def test_log_probs_and_metrics_are_per_token(model, step, whole):
    _, update = whole
    assert set(update.metrics) >= {"pg_loss", "kl", "policy_kl", "clip_fraction", "entropy"}
    for values in (*update.metrics.values(), update.outputs):
        assert [[len(row) for row in rows] for rows in values] == [list(lengths) for _, lengths in LENGTHS]
    for i, group in enumerate(step.groups):
        for j, response in enumerate(group.responses):
            np.testing.assert_allclose(update.outputs[i][j], step.exact[i][j], rtol=0, atol=2e-5)
            logits = model.logits(np.concatenate([group.prompt_ids, response[:-1]]))[len(group.prompt_ids) - 1 :]
            log_probs = log_softmax(logits / TEMPERATURE)
            entropy = -(np.exp(log_probs) * log_probs).sum(-1)
            np.testing.assert_allclose(update.metrics["entropy"][i][j], entropy, rtol=0, atol=5e-5)
            ratio = np.exp(step.rows["reference_log_probs"][i][j] - step.exact[i][j])
            np.testing.assert_allclose(update.metrics["kl"][i][j], ratio - 1 - np.log(ratio), rtol=0, atol=5e-5)
    for name, values in update.metrics.items():
        flat = np.concatenate([row for rows in values for row in rows]).astype(np.float64)
        weights = np.concatenate([row for rows in step.rows["weights"] for row in rows])
        np.testing.assert_allclose(update.weighted[name], (flat * weights).sum(), rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(update.weighted["pg_loss"] + BETA * update.weighted["kl"], update.loss, rtol=1e-5)


@pytest.mark.parametrize(("max_tokens", "bucket", "pieces"), few_of([(HALVES, 16, [3, 2])], [(SINGLES, 16, [1] * 5)]))
def test_any_cut_gives_the_same_gradients(model, step, whole, max_tokens, bucket, pieces):
    assert [len(micro.groups) for micro in cut(step.groups, max_tokens, bucket)] == pieces
    subject, seen = Subject(model, clip_and_kl(), TEMPERATURE, max_tokens, bucket), []
    update = step.run(subject, progress=seen.append)
    assert len(seen) == len(pieces)
    assert sum(seen) == sum(len(response) for group in step.groups for response in group.responses)
    expected_subject, expected = whole
    np.testing.assert_allclose(update.loss, expected.loss, rtol=5e-6)
    for name, gradient in expected_subject.gradients.items():
        assert_close(subject.gradients[name], gradient, 5e-6, name)
    for name, values in expected.metrics.items():
        for rows, others in zip(values, update.metrics[name], strict=True):
            for row, other in zip(rows, others, strict=True):
                np.testing.assert_allclose(other, row, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(update.weighted[name], expected.weighted[name], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_layers_computed_again_give_the_same_bits(model, step, whole):
    expected_subject, expected = whole
    if not expected_subject.decoder.fused:
        pytest.skip("the fused operators cannot be built here")
    subject = Subject(model, clip_and_kl(), TEMPERATURE, recompute=True)
    update = step.run(subject)
    assert update.loss == expected.loss
    for name, gradient in expected_subject.gradients.items():
        assert gradient.any()
        assert subject.gradients[name].tobytes() == gradient.tobytes(), name


@pytest.mark.slow
def test_tokens_that_were_not_sampled_are_context_only(model, step):
    """Whatever stands on them changes nothing; what they are changes what comes after them."""
    rng = np.random.default_rng(3)
    masks = [tuple(np.arange(len(r)) % 3 != 1 for r in group.responses) for group in step.groups]
    groups = [replace(group, sampled=of) for group, of in zip(step.groups, masks, strict=True)]
    objective = clip_and_kl(entropy_coef=0.1)

    subject = Subject(model, objective, TEMPERATURE)

    def update(groups, rest):
        """rest: what stands in all inputs on tokens that were not sampled; their weight is 0."""
        rows = {
            name: [
                tuple(np.where(mask, row, 0 if name == "weights" else rest) for row, mask in zip(*pair, strict=True))
                for pair in zip(given, masks, strict=True)
            ]
            for name, given in step.rows.items()
        }
        done = subject.updater(groups, 0.0, **rows)
        return done, dict(subject.gradients)

    done, gradients = update(groups, 0.5)
    for rest in (np.nan, -1e30):
        same, others = update(groups, rest)
        assert (same.loss, same.weighted) == (done.loss, done.weighted)
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(others[name], gradient, err_msg=name)
    for name, rows in done.metrics.items():
        for of_group, of_masks in zip(rows, masks, strict=True):
            assert [len(row) for row in of_group] == [mask.sum() for mask in of_masks], name
    changed = [
        replace(group, responses=tuple(np.where(mask, *pair) for mask, pair in zip(of, pairs, strict=True)))
        for group, of in zip(groups, masks, strict=True)
        for pairs in [[(ids, rng.integers(0, 64, len(ids)).astype(np.int32)) for ids in group.responses]]
    ]
    assert update(changed, 0.5)[0].loss != done.loss


@pytest.mark.slow
@pytest.mark.parametrize(("form", "share"), [("fused", 0.35), ("composed", 0.8)])
def test_layers_computed_again_are_not_kept(form, share):
    """Of 12 layers, in a process of its own each: they keep what one layer keeps, and their inputs.

    On CPU the kernels of composed layers keep tables besides, which are most of what is left.
    """
    script = Path(__file__).parents[1] / "helpers" / "layer_memory.py"
    kept, again = (
        float(subprocess.run([sys.executable, script, how, form], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "again")
    )
    assert kept > 300
    assert again < share * kept


def test_a_step_that_is_not_finite_is_skipped_and_the_next_is_not(step, whole):
    subject, _ = whole
    before = subject.weights()
    weights = [list(rows) for rows in step.rows["weights"]]
    weights[1][0] = np.full(6, np.inf)
    with np.errstate(invalid="ignore"):
        update = subject.updater(step.groups, RATE, **step.rows | {"weights": weights})
    assert not update.result.applied
    for name, weight in subject.weights().items():
        np.testing.assert_array_equal(weight, before[name])
    compiled = compile_seconds()
    again = step.run(subject)
    assert compile_seconds() == compiled
    assert again.result.applied
    assert np.isfinite(again.loss)


@pytest.mark.usefixtures("memory")
def test_a_loss_that_is_not_finite_skips_the_update_on_all_ranks(step, whole, monkeypatch):
    """The gradient is finite, and says to the others what only this rank knows."""
    subject, _ = whole
    before, gradients = subject.weights(), Gradients.__call__

    def overflowing(*given):
        return [replace(result, loss=np.inf) for result in gradients(*given)]

    monkeypatch.setattr(Gradients, "__call__", overflowing)
    update = step.run(subject)
    assert not update.result.applied
    assert any(np.isnan(gradient).any() for gradient in subject.gradients.values())
    for name, weight in subject.weights().items():
        np.testing.assert_array_equal(weight, before[name])


class Run:
    """A model, its updater and its engine over the same weights."""

    def __init__(self, model, seed):
        self.model = model
        self.subject = Subject(model, clip_and_kl(on_policy=True), optimizer=OptimizerSettings(lr=1e-2), moves=True)
        sampling = SamplingSettings(max_new_tokens=8)
        self.engine = Engine(model.config, self.subject.decoder, sampling, 6, 12, (3,), seed, length_bucket=8)

    def reset(self):
        optimizer = self.subject.optimizer
        for name, parameter in self.subject.parameters.items():
            backend.write(parameter, self.model.arrays[name])
        for moment in (*optimizer.first, *optimizer.second):
            backend.write(moment, 0)
        optimizer.updates = 0

    def two_steps(self):
        """Generate, reward, advantage, update, twice; returns tokens, losses and the weights after them."""
        rng = np.random.default_rng(0)
        prompts = [Prompt(i, rng.integers(0, 64, n).astype(np.int32)) for i, n in enumerate((2, 12, 5))]
        tokens, losses = [], []
        for step in (1, 2):
            generated = self.engine.generate(prompts, 4, step)
            update = self.one_step([(g.prompt.token_ids, [r.response_ids for r in g.rollouts]) for g in generated])
            # The generator and the train graph see the same weights, also after an update.
            for group, rows in zip(generated, update.outputs, strict=True):
                for rollout, row in zip(group.rollouts, rows, strict=True):
                    np.testing.assert_allclose(rollout.row("policy_log_probs"), row, rtol=0, atol=1e-4)
            tokens += [rollout.response_ids.tolist() for group in generated for rollout in group.rollouts]
            losses.append(update.loss)
        return tokens, losses, self.subject.weights()

    def one_step(self, pairs):
        groups = [SequenceGroup(prompt, tuple(responses)) for prompt, responses in pairs]
        rewards = [np.array([(response % 2).mean() for response in group.responses]) for group in groups]
        count = sum(len(response) for group in groups for response in group.responses)
        return self.subject.updater(
            groups,
            1e-2,
            weights=rows_like(groups, lambda n: np.full(n, 1 / count)),
            advantages=[
                [np.full(len(r), reward - of_group.mean()) for r, reward in zip(group.responses, of_group, strict=True)]
                for group, of_group in zip(groups, rewards, strict=True)
            ],
            reference_log_probs=rows_like(groups, lambda n: np.full(n, -2.0)),
        )


@pytest.mark.slow
@pytest.mark.parametrize("compiled_anew", [False, True])
def test_the_same_seed_twice_gives_the_same_bits(compiled_anew):
    model = SmallModel.random(7, num_layers=1)
    run = Run(model, seed=1)
    tokens, losses, weights = run.two_steps()
    assert all(not np.array_equal(weights[name], start) for name, start in model.arrays.items())
    if compiled_anew:
        run = Run(model, seed=1)
    else:
        run.reset()
    other_tokens, other_losses, other_weights = run.two_steps()
    assert tokens == other_tokens
    assert losses == other_losses
    for name, weight in weights.items():
        assert weight.tobytes() == other_weights[name].tobytes()
