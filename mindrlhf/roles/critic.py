"""PPO's critic: values before a step's updates, and updates towards the returns."""

from collections.abc import Callable, Sequence

import numpy as np

from mindrlhf.checkpoint.weights import checkpoint_config, checkpoint_reader
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.model_roles import CRITIC, POLICY
from mindrlhf.models.parameters import VALUE_HEAD, ParameterSpec
from mindrlhf.parallel.partition import Partition
from mindrlhf.roles.part import Opening, RolePart
from mindrlhf.roles.policy_updates import Updates
from mindrlhf.training.graphs import Values
from mindrlhf.training.objective import value_objective
from mindrlhf.training.scoring import Scorer
from mindrlhf.training.updater import Update
from mindrlhf.types import Experience


class Critic(RolePart):
    """Transformer of the policy's shape with a value head and its own optimizer.

    Its weights come from a resumed run's checkpoint, else from `--load_critic_checkpoint`, by default the policy's. A
    checkpoint without a value head gets a head of zeros, so that the first values are 0. The loss is the mean over the
    trained tokens of a mini-batch. scorer: computes the value before each token.
    """

    role = CRITIC
    what = "trained critic"

    def __init__(self, opening: Opening):
        super().__init__(opening)
        config = opening.config
        self.settings = getattr(config, self.role.settings)
        part = self.partition
        if opening.checkpoint:
            self.load(checkpoint_reader(opening.checkpoint, self.role.checkpoint, part.model, part))
        else:
            self.load(_reader(opening, self.yaml, part))
        objective = value_objective(self.settings.value_clip)
        optimizer = self.settings.optimizer
        head = Values(self.decoder_for_updates())
        updater = self.open_updater(head, objective, optimizer, config.train, config.memory.swap, config.seed)
        self._updates = Updates(self.role.title, updater, self.data_parallel, "token-mean")
        self.scorer = Scorer(Values(self.decoder), config.train, self.pipeline)

    def update(self, experiences: Sequence[Experience], rate: float, progress: Callable[[int], None]) -> Update:
        """Make one optimizer update from a mini-batch with values and returns."""
        return self._updates.update(experiences, rate, progress)


def _reader(opening: Opening, yaml: ModelYaml, part: Partition) -> Callable[[ParameterSpec], np.ndarray]:
    """Read the critic's parameters from a critic's checkpoint, or from a policy's."""
    name = CRITIC.name
    stored = checkpoint_config(opening.roles[name].path, seeing=True)
    if stored is not None and stored.value_head:
        return opening.weights(name).reader(part)
    policy = opening.roles[POLICY.name].model.base
    read = opening.weights(name, policy).reader(Partition.of_yaml(yaml, policy, part.rank))

    def read_or_zero(spec: ParameterSpec) -> np.ndarray:
        return np.zeros(part.shape(spec), np.float32) if spec.name == VALUE_HEAD else read(spec)

    return read_or_zero
