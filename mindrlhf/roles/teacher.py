"""Teacher of on-policy distillation: a frozen model that scores the policy's tokens."""

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.checkpoint.open import Weights
from mindrlhf.job import Job
from mindrlhf.model_roles import TEACHER
from mindrlhf.roles.part import ModelPart
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.scoring import Scorer


class Teacher(ModelPart):
    """Frozen model of any size with the policy's vocabulary, in the training layout.

    Its log-probs are at the temperature of generation, like the policy's.
    """

    role = TEACHER
    what = "teacher"

    def __init__(self, job: Job, collectives: Collectives, max_positions: int):
        config, (path, model) = job.config, job.teacher
        super().__init__(job.train, model, collectives, max_positions)
        self.load(Weights(path, model, config.seed).reader(self.partition))
        self.scorer = Scorer(PolicyLogProbs(self.decoder, config.rollout.temperature), config.train, self.pipeline)
