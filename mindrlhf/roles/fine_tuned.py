"""Fine-tuned model: trained to make demonstrated answers more probable."""

from collections.abc import Sequence

from mindrlhf.roles.part import Opening
from mindrlhf.roles.policy_updates import Advance, Updates
from mindrlhf.roles.trained import TrainedModel
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD
from mindrlhf.training.scoring import Scorer
from mindrlhf.training.updater import Update


class FineTuned(TrainedModel):
    """Trained model with the mean of -log p over demonstrated tokens as its loss.

    scorer: computes log-probs of demonstrations, for validation.
    """

    what = "fine-tuned model"

    def __init__(self, opening: Opening):
        super().__init__(opening)
        config = opening.config
        head = PolicyLogProbs(self.decoder_for_updates(), temperature=1.0, every_token=True)
        updater = self.open_updater(head, NEGATIVE_LOG_LIKELIHOOD, config.optimizer, config.train, seed=config.seed)
        self._updates = Updates(self.what, updater, self.data_parallel, "token-mean")
        scoring = PolicyLogProbs(self.decoder, temperature=1.0, every_token=True)
        self.scorer = Scorer(scoring, config.train, self.pipeline)

    def update(self, pairs: Sequence[SequenceGroup], rate: float, progress: Advance) -> Update:
        """Make one optimizer update from this rank's demonstrations."""
        return self._updates.update_groups(pairs, [pair.sampled for pair in pairs], rate, progress)
