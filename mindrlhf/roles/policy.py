"""Policy: the trained model of reinforcement learning."""

from collections.abc import Mapping
from typing import Any

from mindrlhf.configs.model_yaml import rounds_rollouts
from mindrlhf.roles.part import Opening
from mindrlhf.roles.policy_updates import PolicyUpdates, open_objective
from mindrlhf.roles.trained import TrainedModel
from mindrlhf.training.first_routing import FirstRouting
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.scoring import Scorer


class Policy(TrainedModel):
    """Trained model with the policy's loss.

    scorer: computes log-probs of the policy before a step's updates; None if no one needs them before.
    scores_old: they are the old log-probs; otherwise a step's first update gives these.
    """

    def __init__(self, opening: Opening):
        config = opening.config
        loss = config.algorithm.loss()  # first, because it may refuse its options
        algorithm = config.algorithm
        dropout = opening.roles[self.role.name].model.dropout
        # A pass that is a step's first and only one has the old policy's routing.
        self.records = config.rollout.routing_replay == "old" and (not algorithm.single_update or dropout > 0)
        self.replays = config.rollout.records_routing or self.records
        super().__init__(opening)
        temperature = config.rollout.temperature
        first = FirstRouting() if self.records else None
        head = PolicyLogProbs(self.decoder_for_updates(), temperature, entropy_gradient=algorithm.entropy_coef > 0)
        objective = open_objective(config, loss, dropout)
        swap = config.memory.swap
        updater = self.open_updater(head, objective, config.optimizer, config.train, swap, config.seed)
        self.update = PolicyUpdates(config, updater, loss, self.data_parallel, first)
        self.scores_old = algorithm.scores_old_policy(dropout)
        rounds = rounds_rollouts(opening.yamls["train"], opening.yamls["infer"], config.rollout.weights)
        if self.scores_old or (rounds and (algorithm.reads_policy or loss.select)):
            self.scorer = Scorer(PolicyLogProbs(self.decoder, temperature), config.train, self.pipeline, first)
        self.verifies = config.rollout.verify_weights

    def counters(self) -> Mapping[str, Any]:
        return {**super().counters(), "updates": self.update}
