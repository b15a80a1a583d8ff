"""PPO's critic in a step: values before the updates, and its own updates towards the returns."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from mindspore import Parameter

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.checkpoint.open import Weights, checkpoint_config, checkpoint_reader
from mindrlhf.checkpoint.resume import Checkpoint
from mindrlhf.checkpoint.training_state import CRITIC_WEIGHTS
from mindrlhf.configs.grpo import CriticSettings
from mindrlhf.job import Job
from mindrlhf.models.initialize import build_parameters
from mindrlhf.models.parameters import VALUE_HEAD, ParameterSpec
from mindrlhf.parallel.partition import Partition
from mindrlhf.roles.part import Side
from mindrlhf.roles.policy import loss_weights, sequences, warn_of_culprits
from mindrlhf.roles.weights import open_updater
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.graphs import Values
from mindrlhf.training.objective import value_objective
from mindrlhf.training.optimizer import AdamW
from mindrlhf.training.scoring import Scorer
from mindrlhf.training.updater import Update, Updater
from mindrlhf.types import Experience


class Critic:
    """A transformer of the policy's shape with a value head, and its own optimizer.

    parameters: this rank's part of it, by name. side: the training layout, of the critic's parameter table. The loss is
    the mean over the trained tokens of a mini-batch.
    """

    def __init__(
        self,
        settings: CriticSettings,
        scorer: Scorer,
        updater: Updater,
        parameters: Mapping[str, Parameter],
        side: Side,
    ):
        self.settings, self.parameters, self.side = settings, parameters, side
        self._scorer, self._updater, self._data_parallel = scorer, updater, side.data_parallel

    def __call__(self, groups: Sequence[SequenceGroup]) -> list[tuple[np.ndarray, ...]]:
        """For each group, G arrays float32[R]: the value before each token."""
        return self._scorer(groups)

    @property
    def optimizer(self) -> AdamW:
        return self._updater.optimizer

    @property
    def compile_s(self) -> float:
        """Seconds of the last call that went into building graphs."""
        return self._scorer.compile_s

    def update(self, experiences: Sequence[Experience], rate: float, progress: Callable[[float], None]) -> Update:
        """One optimizer update from a mini-batch of this rank's experiences, which have values and returns."""
        weights, tokens = loss_weights(experiences, "token-mean", 1, self._data_parallel)
        update = self._updater(
            [sequences(e) for e in experiences],
            rate,
            weights=weights,
            empty=not tokens,
            progress=progress,
            old_values=[e.values for e in experiences],
            returns=[e.returns for e in experiences],
        )
        warn_of_culprits("critic", experiences, update)
        return update


def open_critic(
    job: Job, collectives: Collectives, kernels, positions: int, checkpoint: Checkpoint | None = None
) -> Critic:
    """The critic of a run, on the training layout; all ranks open theirs at the same time.

    Its weights are those of the checkpoint that a run goes on from, else of `--load_critic_checkpoint`, by default the
    policy's; one without a value head gets one of zeros, so that the first values are 0.
    """
    settings, train = job.config.critic, job.config.train
    side = Side(job.train, job.model.as_critic(), collectives)
    part = side.partition
    read = checkpoint_reader(checkpoint, CRITIC_WEIGHTS, part.model, part) if checkpoint else _reader(job, part)
    parameters = build_parameters(part.specs, read)
    decoder = side.decoder(parameters, kernels, positions)
    objective = value_objective(settings.value_clip)
    updater = open_updater(
        settings.optimizer, train, Values(decoder), objective, parameters, side, job.config.memory.swap
    )
    return Critic(settings, Scorer(Values(decoder), train, side.pipeline), updater, parameters, side)


def _reader(job: Job, part: Partition) -> Callable[[ParameterSpec], np.ndarray]:
    """What gives the critic's parameters: from a critic's checkpoint, or from a policy's."""
    path, seed = job.critic_path, job.config.seed
    stored = checkpoint_config(path)
    if stored is not None and stored.value_head:
        return Weights(path, part.model, seed).reader(part)
    read = Weights(path, job.model, seed).reader(Partition.of_yaml(job.train, job.model, part.rank))

    def read_or_zero(spec: ParameterSpec) -> np.ndarray:
        return np.zeros(part.shape(spec), np.float32) if spec.name == VALUE_HEAD else read(spec)

    return read_or_zero
