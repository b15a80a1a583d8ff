"""One update's loss and gradient are the same however its groups are shared over ranks and cut into micro-batches.

Ranks are simulated: on each, the trainer's own `PolicyUpdates` runs beside the others, so that denominators and chosen
tokens come from all of them, and what it hands on goes through the real updater, rank after rank. Sums over ranks are
taken in float64; those of the collectives are tested in `tests/backend` and `tests/parallel/test_sharded_updates.py`.
"""

from dataclasses import replace

import numpy as np
import pytest
from responses import with_advantages
from small_model import SmallModel
from step_parts import an_update, experience, on_ranks

from mindrlhf.algorithms.aggregation import MODES
from mindrlhf.configs.grpo import GRPOSettings, TrainSettings
from mindrlhf.roles.policy_updates import PolicyUpdates, open_objective, sequences
from mindrlhf.training.batch import cut
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.optimizer import AdamW
from mindrlhf.training.updater import Updater

TOLERANCE = 2e-6  # the last bit of a log-prob of -17, whose k3 term of 9,000 nats is the largest
GROUPS, SAMPLES = 6, 3
BUCKET = 16  # every prompt and response fits into one: graphs differ by their number of groups alone
POSITIONS = BUCKET + SAMPLES * BUCKET  # padded, of one group

# (ranks, most groups of a micro-batch) -> groups of each micro-batch of a rank, weight-0 padding not counted.
CUTS = {
    (1, 6): [6],
    (1, 3): [3, 3],
    (1, 2): [2, 2, 2],
    (1, 1): [1, 1, 1, 1, 1, 1],
    (2, 3): [3],
    (2, 2): [2, 1],
    (2, 1): [1, 1, 1],
    (3, 2): [2],
    (3, 1): [1, 1],
    (6, 1): [1],
}
SLOW_SIZES = (3,)  # a graph each
CASES = {
    "clip": {"kl_estimator": "k3", "beta": 0.2, "entropy_coef": 0.05},
    "gspo": {"epsilon_low": 0.2, "epsilon_high": 0.2},
    "geo_mean": {},
    "kl_cov": {"kl_cov_ratio": 0.1},
}
OWN_AGGREGATION = ("gspo", "geo_mean")


def settings(name: str, aggregation: str) -> GRPOSettings:
    # Two updates of a step, so that the old policy is not the one that is updated.
    algorithm = {"policy_loss": name, "beta": 0.0, "updates_per_iteration": 2, "aggregation": aggregation}
    return GRPOSettings(algorithm=algorithm | CASES[name], rollout={"max_new_tokens": 14})


class Cutter:
    """An updater that takes so many groups at once, over its own copy of a small model whose weights stay."""

    def __init__(self, name: str, size: int):
        config = settings(name, "token-mean")
        model = SmallModel.random(8, num_layers=1)
        decoder, parameters = model.build()
        self.optimizer = AdamW(config.optimizer, [parameters[spec.name] for spec in model.specs], model.specs)
        head = PolicyLogProbs(decoder, 1.0, entropy_gradient=config.algorithm.entropy_coef > 0)
        objective = open_objective(config, config.algorithm.loss())
        self.updater = Updater(head, objective, self.optimizer, micro_batches(size), self._keep)
        self.gradients = {}

    def _keep(self):
        """Stands where ranks sum their gradients."""
        for parameter, buffer in zip(self.optimizer.parameters, self.optimizer.gradients, strict=True):
            before = self.gradients.get(parameter.name, 0.0)
            self.gradients[parameter.name] = before + buffer.asnumpy().astype(np.float64)


class Subject:
    """A loss with a cutter for each size of micro-batch; each compiles one graph."""

    def __init__(self, name: str):
        self.name, self.loss = name, settings(name, "token-mean").algorithm.loss()
        self.cutters = {}

    def update(self, experiences, ranks: int, size: int, aggregation: str):
        """(loss, gradients by name, weighted metrics) of a step, each the sum over ranks."""
        config = settings(self.name, aggregation)
        if size not in self.cutters:
            self.cutters[size] = Cutter(self.name, size)
        cutter = self.cutters[size]

        def handed_on(rank):
            given = {}

            def updater(groups, rate, **arguments):
                given.update(arguments, groups=groups)
                return an_update()

            updater.objective = cutter.updater.objective
            PolicyUpdates(config, updater, self.loss, rank)(rank.share(experiences), 0.0, lambda share: None)
            return given

        cutter.gradients = {}
        loss, metrics = 0.0, {}
        for given in on_ranks(ranks, handed_on):
            update = cutter.updater(learning_rate=0.0, **given)
            assert update.result.applied
            loss += update.loss
            for metric, value in update.weighted.items():
                metrics[metric] = metrics.get(metric, 0.0) + value
        return loss, cutter.gradients, metrics


def micro_batches(size: int) -> TrainSettings:
    return TrainSettings(max_tokens_per_micro_batch=size * POSITIONS, length_bucket=BUCKET)


def a_step():
    """Six groups of three responses of 1 to 14 tokens; a response and a whole group are left out of the loss."""
    rng = np.random.default_rng(3)

    def near(rows, scale):
        return tuple((row + rng.normal(scale=scale, size=len(row))).astype(np.float32) for row in rows)

    experiences = []
    for index in range(GROUPS):
        drawn = experience(index, rng.normal(size=SAMPLES), rng.integers(1, 15, SAMPLES))
        drawn = with_advantages(drawn, rng.normal(scale=4.0, size=SAMPLES))
        drawn = replace(drawn, trained=np.array([index != 4, index not in (2, 4), index != 4]))
        log_probs = drawn.rows("policy_log_probs")
        old = near(log_probs, 0.1)
        experiences.append(drawn.with_tokens(old_log_probs=old, reference_log_probs=near(log_probs, 0.3)))
    return experiences


@pytest.fixture(scope="module")
def compiled():
    """Name of a loss -> its subject."""
    subjects = {}

    def get(name: str) -> Subject:
        if name not in subjects:
            subjects[name] = Subject(name)
        return subjects[name]

    return get


def test_the_cuts_are_those_that_are_meant():
    groups = [sequences(one) for one in a_step()]
    for (ranks, size), pieces in CUTS.items():
        share = groups[: GROUPS // ranks]
        given = micro_batches(size)
        made = cut(share, given.max_tokens_per_micro_batch, given.length_bucket)
        assert [len(micro.groups) for micro in made] == pieces


def case(name: str, aggregation: str):
    return pytest.param(name, aggregation, marks=[pytest.mark.slow] * (name != "clip"))


PAIRS = [(name, mode) for name in CASES for mode in MODES if name not in OWN_AGGREGATION or mode == "token-mean"]


@pytest.mark.parametrize(("name", "aggregation"), [case(*pair) for pair in PAIRS])
def test_any_cut_on_any_number_of_ranks(request, compiled, name, aggregation):
    subject, experiences = compiled(name), a_step()
    loss, gradients, metrics = subject.update(experiences, 1, GROUPS, aggregation)
    whole = joined(gradients)
    assert np.abs(whole).max() > 1e-2  # the comparison is about something
    rng = np.random.default_rng(0)
    for ranks, size in CUTS:
        if size in SLOW_SIZES and not request.config.getoption("--slow"):
            continue
        shuffled = [experiences[index] for index in rng.permutation(GROUPS)]  # who shares a rank, and a micro-batch
        other, slopes, figures = subject.update(shuffled, ranks, size, aggregation)
        assert other == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE), (ranks, size)
        assert slopes.keys() == gradients.keys()
        error = np.linalg.norm(joined(slopes) - whole) / np.linalg.norm(whole)
        assert error <= TOLERANCE, (ranks, size, error)
        assert figures == pytest.approx(metrics, rel=1e-5, abs=1e-6)


def joined(gradients: dict[str, np.ndarray]) -> np.ndarray:
    """All gradients as one vector: what a rounding is small beside."""
    return np.concatenate([gradient.ravel() for gradient in gradients.values()])
