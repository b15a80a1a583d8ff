"""The policy's updates from mini-batches of a step."""

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from mindrlhf.algorithms.aggregation import batch_totals, token_weights
from mindrlhf.algorithms.losses import PolicyLoss
from mindrlhf.algorithms.rollout_correction import importance_weights
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.metrics.progress import Advance
from mindrlhf.model_roles import POLICY
from mindrlhf.models.routing import Routing
from mindrlhf.parallel.data_parallel import DataParallel
from mindrlhf.training.batch import Rows, SequenceGroup
from mindrlhf.training.first_routing import FirstRouting
from mindrlhf.training.objective import Objective, policy_objective
from mindrlhf.training.updater import Update, Updater
from mindrlhf.types import Experience, put_back, taken

_log = logging.getLogger(__name__)


class Updates:
    """Optimizer updates of `what` from mini-batches of all ranks' experiences.

    data_parallel: the training ranks' axis. aggregation, limit: see `loss_weights`.
    """

    def __init__(self, what: str, updater: Updater, data_parallel: DataParallel, aggregation: str, limit: int = 1):
        self._what = what
        self._updater = updater
        self._data_parallel = data_parallel
        self._aggregation = aggregation
        self._limit = limit

    def update(self, experiences: Sequence[Experience], rate: float, progress: Advance) -> Update:
        """Make one update from experiences with the arrays that the objective reads, see `update_groups`."""
        masks = [e.trained_tokens for e in experiences]
        fields = {name: [e.rows(name) for e in experiences] for name in self._updater.objective.fields}
        return self.update_groups(self.groups(experiences), masks, rate, progress, **fields)

    def groups(self, experiences: Sequence[Experience]) -> list[SequenceGroup]:
        """Return the sequences of experiences."""
        return [sequences(e) for e in experiences]

    def update_groups(
        self, groups: Sequence[SequenceGroup], masks: Rows, rate: float, progress: Advance, **fields: Rows
    ) -> Update:
        """Make one update; nothing changes if no rank trains on any token.

        masks: the tokens to train on. rate: learning rate. progress, fields: see `Updater`.
        """
        weights, tokens = loss_weights(masks, self._aggregation, self._limit, self._data_parallel)
        update = self._updater(groups, rate, weights=weights, empty=not tokens, progress=progress, **fields)
        if update.bad_samples:
            first, *others = update.bad_samples
            more = f" ({len(others)} more samples like it)" if others else ""
            where = f"prompt {groups[first.group].identity[0]}, sample {first.sample}"
            _log.warning(f"an update of the {self._what} was skipped: {where}: {first.reason} is not finite{more}")
        return update


class PolicyUpdates(Updates):
    """Updates of the policy by its loss.

    first: the routing of a step's first pass, which updates replay. Without scored log-probs this is the first update,
    of all groups, as it gives the old log-probs.
    """

    def __init__(
        self,
        config: GRPOSettings,
        updater: Updater,
        loss: PolicyLoss,
        data_parallel: DataParallel,
        first: FirstRouting | None = None,
    ):
        algorithm = config.algorithm
        limit = algorithm.aggregation_tokens or config.rollout.max_new_tokens
        super().__init__(POLICY.title, updater, data_parallel, loss.aggregation or algorithm.aggregation, limit)
        self._config = config
        self._loss = loss
        self._first = first
        self._count = 0

    def __call__(
        self, experiences: Sequence[Experience], rate: float, progress: Advance, kl_coefficient: float | None = None
    ) -> Update:
        """Make one update from experiences with advantages and all log-probs.

        kl_coefficient: None without a KL term.
        """
        if kl_coefficient is not None:
            coefficient = np.float32(kl_coefficient)
            experiences = [
                e.with_tokens(kl_coefficients=tuple(np.full(n, coefficient) for n in e.lengths)) for e in experiences
            ]
        if self._loss.select:
            chosen = zip(experiences, self._selected(experiences), strict=True)
            experiences = [e.with_tokens(selected=rows) for e, rows in chosen]
        self._count += 1
        update = self.update(experiences, rate, progress)
        if self._first and _is_first_pass(experiences):
            self._first.keep(super().groups(experiences), update.routing)
        return update

    def groups(self, experiences: Sequence[Experience]) -> list[SequenceGroup]:
        groups = super().groups(experiences)
        if self._first is None:
            return groups
        return self._first.begin(groups) if _is_first_pass(experiences) else self._first.given(groups)

    def state_dict(self) -> dict[str, int]:
        """Return the number that keys random choices of a loss, for a resumed run."""
        return {"count": self._count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore `state_dict`."""
        self._count = state["count"]

    def _selected(self, experiences: Sequence[Experience]) -> Rows:
        """Choose tokens from all ranks' mini-batch; each rank keeps its own."""
        rows = [
            pair
            for e in experiences
            for pair in zip(
                taken(policy_log_probs(e), e.trained_tokens), taken(e.rows("advantages"), e.trained_tokens), strict=True
            )
        ]
        parts = self._data_parallel.gather(rows)
        every = [row for part in parts for row in part]
        seed = self._config.seed * 1_000_003 + self._count
        chosen = self._loss.select([log_probs for log_probs, _ in every], [given for _, given in every], seed)
        start = sum(len(part) for part in parts[: self._data_parallel.rank])
        masks = [mask for e in experiences for mask in e.trained_tokens]
        mine = iter(put_back(chosen[start : start + len(rows)], masks))
        return [tuple(next(mine) for _ in e.group.rollouts) for e in experiences]


def loss_weights(masks: Rows, aggregation: str, limit: int, data_parallel: DataParallel) -> tuple[Rows, int]:
    """Return per-token loss weights, and the number of trained tokens over all ranks.

    Excluded responses have weight 0; denominators are over all ranks. masks: the trained tokens. aggregation: a name in
    `algorithms.aggregation.MODES`. limit: the constant that some modes divide by, in tokens.
    """
    totals = data_parallel.sum(batch_totals([np.count_nonzero(row) for rows in masks for row in rows]))
    weights = [[token_weights(row[None], aggregation, totals, max_tokens=limit)[0] for row in rows] for rows in masks]
    return weights, int(totals[0])


def _is_first_pass(experiences: Sequence[Experience]) -> bool:
    """Test for an update before which nothing has given the old policy's log-probs."""
    return not all("old_log_probs" in e.tokens for e in experiences)


def sequences(experience: Experience) -> SequenceGroup:
    """Return a group with what the engine recorded.

    Token ids, masks of sampled tokens, identity, pictures, and the routing.
    """
    group = experience.group
    responses = tuple(rollout.response_ids for rollout in group.rollouts)
    routing = Routing.of_rollouts(tuple(rollout.tokens for rollout in group.rollouts))
    identity = (group.prompt.id, group.prompt.occurrence)
    pictures = (group.prompt.pictures, *(tuple(rollout.pictures.values()) for rollout in group.rollouts))
    shown = pictures if any(pictures) else ()
    return SequenceGroup(group.prompt.token_ids, responses, experience.sampled, identity, shown, routing)


def policy_log_probs(experience: Experience) -> tuple[np.ndarray, ...]:
    """Return the policy's log-probs before updates: from the train graph, else the engine.

    The engine's serve where its products are those of training, but for the last digits.
    """
    best = ("scored_log_probs", "old_log_probs", "policy_log_probs")
    return experience.rows(next((name for name in best if name in experience.tokens), best[-1]))


def open_objective(config: GRPOSettings, loss: PolicyLoss, dropout: float = 0.0) -> Objective:
    """Build the objective that the policy's updates minimise.

    dropout: of the updates; generation has none.
    """
    algorithm = config.algorithm
    correction = config.rollout_correction
    in_loss = algorithm.beta > 0 and not algorithm.kl_in_reward
    corrects = correction.level is not None
    return policy_objective(
        loss,
        # Groups carried over from the previous step were drawn by another policy than the one being updated.
        on_policy=algorithm.single_update and not config.dynamic_sampling.enabled and not dropout,
        kl=algorithm.kl_estimator if in_loss else None,
        beta=algorithm.beta if algorithm.kl_target is None else None,
        kl_ratio=algorithm.kl_ratio,
        correction=importance_weights(**correction.model_dump()) if corrects else None,
        entropy_coef=algorithm.entropy_coef,
    )
