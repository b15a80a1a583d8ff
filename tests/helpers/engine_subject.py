"""A small model to generate with, prompts for it, and what its responses should be, in float64."""

from dataclasses import dataclass

import numpy as np
from reference_sampling import filtered, respond
from small_model import SmallModel

from mindrlhf.configs.grpo import SamplingSettings, TrainSettings
from mindrlhf.random_numbers import uniform
from mindrlhf.rollout.engine import Engine
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.scoring import Scorer
from mindrlhf.types import Prompt

SEED, STEP, NEW, BUCKET, TEMPERATURE = 11, 3, 12, 8, 0.7
STOP = (5, 9, 21)
LENGTHS = (1, 3, 8, 9, 17)
FILTERS = {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.4}


@dataclass(frozen=True, eq=False)
class Subject:
    """A small model, compiled over its own parameters, and prompts of very different lengths for it."""

    model: SmallModel
    decoder: object
    parameters: dict
    prompts: list[Prompt]

    @classmethod
    def random(cls, operators=None, records=False, **changes) -> "Subject":
        model = SmallModel.random(1, **changes)
        rng = np.random.default_rng(0)
        # Ids are no row numbers: they come from the dataset.
        prompts = [Prompt(100 + 7 * i, rng.integers(0, 64, n).astype(np.int32)) for i, n in enumerate(LENGTHS)]
        return cls(model, *model.build(operators=operators, records=records), prompts)

    def engine(self, slots, bucket=BUCKET, decode_text=None, **settings) -> Engine:
        sampling = SamplingSettings(**{"max_new_tokens": NEW, "temperature": TEMPERATURE} | settings)
        longest = max(LENGTHS)
        return Engine(self.model.config, self.decoder, sampling, slots, longest, STOP, SEED, bucket, decode_text)

    def simulated(self, prompt, sample, arrays=None, **settings):
        """Token ids and log-probs of one response, in float64."""
        numbers = uniform(SEED, STEP, prompt.id, sample, np.arange(NEW))
        settings = {"temperature": TEMPERATURE} | settings

        def next_logits(ids):
            return self.model.logits(ids, arrays)[-1]

        return respond(next_logits, prompt.token_ids, numbers, stop_ids=STOP, **settings)

    def drawn(self, prompt, sample, response, *, min_new_tokens=0, **filters) -> tuple[int, float]:
        """The token that follows a response, and its log-prob under what it is drawn from, in float64."""
        ids = [*prompt.token_ids.tolist(), *response]
        banned = STOP if len(response) < min_new_tokens else ()
        filters = {"temperature": TEMPERATURE} | filters
        probabilities = filtered(self.model.logits(ids)[-1], **filters, seen=set(ids), banned=banned)
        number = uniform(SEED, STEP, prompt.id, sample, np.array([len(response)]))[0]
        token = int(np.argmax(np.cumsum(probabilities) > number))
        return token, float(np.log(probabilities[token]))

    def score(self, groups, temperature=TEMPERATURE):
        """The train graph's log-probs of what an engine gave."""
        scorer = Scorer(PolicyLogProbs(self.decoder, temperature), TrainSettings(length_bucket=BUCKET))
        return scorer([SequenceGroup(g.prompt.token_ids, tuple(r.response_ids for r in g.rollouts)) for g in groups])


def by_sample(groups) -> dict:
    return {(group.prompt.id, rollout.sample_index): rollout for group in groups for rollout in group.rollouts}
