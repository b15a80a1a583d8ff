"""An updater over its own copy of a small model, and groups for it."""

import numpy as np

from mindrlhf import backend
from mindrlhf.algorithms.losses import policy_loss
from mindrlhf.configs.grpo import OptimizerSettings, TrainSettings
from mindrlhf.models.head import CHUNK_NUMBERS
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.objective import policy_objective
from mindrlhf.training.optimizer import AdamW, UpdateResult
from mindrlhf.training.updater import Updater

TEMPERATURE, BETA, RATE = 0.8, 0.2, 1e-3
# Prompt and responses: prompts and samples of one token among them. In micro-batches of three, one is padding.
LENGTHS = [(7, (4, 9)), (1, (6, 1)), (12, (2, 5)), (3, (10, 3)), (2, (1, 12))]
# No sign flips of vanishing gradients: the first update of Adam divides each by itself.
OPTIMIZER = OptimizerSettings(eps=1e-5, weight_decay=0.1, max_grad_norm=1.0)


def clip_and_kl(on_policy=False, entropy_coef=0.0):
    return policy_objective(policy_loss("clip"), on_policy=on_policy, kl="k3", beta=BETA, entropy_coef=entropy_coef)


class Still(AdamW):
    """Finds the norm, and leaves the weights as they are: two graphs fewer to compile."""

    def step(self, rate, empty=False):
        norm = np.sqrt(sum(np.square(buffer.asnumpy().astype(np.float64)).sum() for buffer in self.gradients))
        for buffer in self.gradients:
            backend.write(buffer, 0.0)
        return UpdateResult(float(norm), rate, not empty and bool(np.isfinite(norm)))


class Subject:
    """An updater over its own copy of a model's weights; `gradients` holds what its last update applied, by name.

    moves: updates change the weights.
    """

    def __init__(
        self,
        model,
        objective,
        temperature=1.0,
        max_tokens=16384,
        bucket=4,
        optimizer=OPTIMIZER,
        entropy_gradient=False,
        chunk_numbers=CHUNK_NUMBERS,
        moves=False,
        **decoder,
    ):
        self.decoder, self.parameters = model.build(**decoder)
        trained = [spec for spec in model.specs if spec.trains]
        self.optimizer = (AdamW if moves else Still)(
            optimizer, [self.parameters[spec.name] for spec in trained], trained
        )
        settings = TrainSettings(max_tokens_per_micro_batch=max_tokens, length_bucket=bucket)
        head = PolicyLogProbs(self.decoder, temperature, chunk_numbers, entropy_gradient, every_token=True)
        self.updater = Updater(head, objective, self.optimizer, settings, self._keep)
        self.gradients = {}

    def _keep(self):
        """Stands where ranks sum their gradients."""
        for parameter, buffer in zip(self.optimizer.parameters, self.optimizer.gradients, strict=True):
            self.gradients[parameter.name] = np.array(buffer.asnumpy())

    def weights(self):
        return {name: np.array(parameter.asnumpy()) for name, parameter in self.parameters.items()}


def random_groups(seed=0):
    rng = np.random.default_rng(seed)
    ids = lambda count: rng.integers(0, 64, count).astype(np.int32)  # noqa: E731
    return [SequenceGroup(ids(prompt), tuple(ids(length) for length in responses)) for prompt, responses in LENGTHS]


def rows_like(groups, make):
    """make(R) for each response, per group."""
    return [tuple(make(len(response)) for response in group.responses) for group in groups]


def assert_close(got, expected, tolerance, name=""):
    """Relative to the size of the whole array."""
    difference = np.linalg.norm(np.asarray(got, np.float64) - expected)
    assert difference <= tolerance * np.linalg.norm(expected), f"{name}: {difference / np.linalg.norm(expected):.2e}"
