"""PPO's critic: values before a step's updates, and updates towards the returns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.checkpoint.open import Weights, checkpoint_config, checkpoint_reader
from mindrlhf.checkpoint.resume import Checkpoint
from mindrlhf.checkpoint.training_state import CRITIC_WEIGHTS
from mindrlhf.job import Job
from mindrlhf.models.parameters import VALUE_HEAD, ParameterSpec
from mindrlhf.parallel.partition import Partition
from mindrlhf.phases import CRITIC, CRITIC_GRADIENTS, CRITIC_MOMENTS
from mindrlhf.roles.part import Arrays, MemoryRole, ModelPart
from mindrlhf.roles.policy_updates import Updates
from mindrlhf.training.graphs import Values
from mindrlhf.training.objective import value_objective
from mindrlhf.training.scoring import Scorer
from mindrlhf.training.updater import Update
from mindrlhf.types import Experience


class Critic(ModelPart):
    """Transformer of the policy's shape with a value head and its own optimizer.

    It has the training layout.

    Its weights come from a resumed run's checkpoint, else from `--load_critic_checkpoint`, by default the policy's. A
    checkpoint without a value head gets a head of zeros, so that the first values are 0. The loss is the mean over the
    trained tokens of a mini-batch. scorer: computes the value before each token.
    """

    what = "trained critic"
    gradients_role, moments_role = CRITIC_GRADIENTS, CRITIC_MOMENTS
    score_phase, score_field = "values", "values"

    def __init__(self, job: Job, collectives: Collectives, max_positions: int, checkpoint: Checkpoint | None = None):
        super().__init__(job.train, job.model.as_critic(), collectives, max_positions)
        self.settings, train, part = job.config.critic, job.config.train, self.partition
        self.load(checkpoint_reader(checkpoint, CRITIC_WEIGHTS, part.model, part) if checkpoint else _reader(job, part))
        objective, swap = value_objective(self.settings.value_clip), job.config.memory.swap
        updater = self.open_updater(Values(self.decoder), objective, self.settings.optimizer, train, swap)
        self._updates = Updates("critic", updater, self.data_parallel, "token-mean")
        self.scorer = Scorer(Values(self.decoder), train, self.pipeline)

    def update(self, experiences: Sequence[Experience], rate: float, progress: Callable[[int], None]) -> Update:
        """Make one optimizer update from a mini-batch with values and returns."""
        values, returns = ([getattr(e, name) for e in experiences] for name in ("values", "returns"))
        return self._updates.update(experiences, rate, progress, old_values=values, returns=returns)

    def memory_roles(self) -> Iterator[MemoryRole]:
        yield CRITIC, [*self.parameters.values(), *self.updater.optimizer.own_rows], False
        yield from self.optimizer_roles()

    def arrays(self) -> Arrays:
        return {**self.trained_arrays(CRITIC_WEIGHTS), **self.moment_arrays("critic_")}

    def counters(self) -> Mapping[str, Any]:
        return {"critic": self.updater.optimizer}


def _reader(job: Job, part: Partition) -> Callable[[ParameterSpec], np.ndarray]:
    """Read the critic's parameters from a critic's checkpoint, or from a policy's."""
    path, seed = job.critic_path, job.config.seed
    stored = checkpoint_config(path)
    if stored is not None and stored.value_head:
        return Weights(path, part.model, seed).reader(part)
    model = job.model.base
    read = Weights(path, model, seed).reader(Partition.of_yaml(job.train, model, part.rank))

    def read_or_zero(spec: ParameterSpec) -> np.ndarray:
        return np.zeros(part.shape(spec), np.float32) if spec.name == VALUE_HEAD else read(spec)

    return read_or_zero
