"""Teacher of on-policy distillation: a frozen model that scores the policy's tokens."""

from collections.abc import Mapping

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.checkpoint.open import Weights
from mindrlhf.checkpoint.resume import Checkpoint
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.model_roles import TEACHER, RoleModel
from mindrlhf.roles.part import ModelPart
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.scoring import Scorer


class Teacher(ModelPart):
    """Frozen model of any size with the policy's vocabulary, in the training layout.

    Its log-probs are at the temperature of generation, like the policy's.
    """

    role = TEACHER

    def __init__(
        self,
        config: GRPOSettings,
        yamls: Mapping[str, ModelYaml],
        roles: Mapping[str, RoleModel],
        collectives: Collectives,
        max_positions: int,
        checkpoint: Checkpoint | None = None,
    ):
        teacher = roles[self.role.name]
        super().__init__(yamls["train"], teacher.model, collectives, max_positions)
        self.load(Weights(teacher.path, teacher.model, config.seed).reader(self.partition))
        self.scorer = Scorer(PolicyLogProbs(self.decoder, config.rollout.temperature), config.train, self.pipeline)
