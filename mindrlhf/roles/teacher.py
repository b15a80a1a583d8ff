"""Teacher of on-policy distillation: a frozen model that scores the policy's tokens."""

from mindrlhf.model_roles import TEACHER
from mindrlhf.roles.part import Opening, RolePart
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.scoring import Scorer


class Teacher(RolePart):
    """Frozen model of any size with the policy's vocabulary.

    Its log-probs are at the temperature of generation, like the policy's.
    """

    role = TEACHER

    def __init__(self, opening: Opening):
        super().__init__(opening)
        config = opening.config
        self.load(opening.weights(self.role.name).reader(self.partition))
        self.scorer = Scorer(PolicyLogProbs(self.decoder, config.rollout.temperature), config.train, self.pipeline)
