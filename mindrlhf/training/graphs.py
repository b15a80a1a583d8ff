"""The compiled graphs of training: token log-probs, and loss with gradients, of a whole model or of one stage."""

from collections.abc import Callable

from mindspore import ParameterTuple, nn, ops

from mindrlhf.models.head import CHUNK_NUMBERS, TokenLogProbs
from mindrlhf.models.transformer import Decoder


class PolicyLogProbs(nn.Cell):
    """(prefix_ids [N, P], prefix_lengths [N], input_ids [N*G, R], targets [N*G, R]) -> log_probs, entropy
    float32[N*G, R].
    """

    def __init__(self, decoder: Decoder, temperature: float, chunk_numbers: int = CHUNK_NUMBERS):
        super().__init__(auto_prefix=False)
        self.decoder = decoder
        self.token_log_probs = TokenLogProbs(temperature, chunk_numbers, decoder.shards)

    def construct(self, prefix_ids, prefix_lengths, input_ids, targets):
        x = self.decoder.tokens(prefix_ids, input_ids)
        return self.from_stage(prefix_ids, prefix_lengths, input_ids, x, targets)

    def from_stage(self, prefix_ids, prefix_lengths, input_ids, x, targets):
        """The same from x [rows, hidden], what the stage before the last gave."""
        hidden = self.decoder.stage(prefix_ids, prefix_lengths, input_ids, x)
        out = self.token_log_probs(hidden, self.decoder.head_weight(), targets.reshape((-1,)))
        return out[0].reshape(targets.shape), out[1].reshape(targets.shape)


class Loss(nn.Cell):
    """Sum over tokens of weights * objective, and what was met on the way.

    objective(log_probs, old_log_probs, reference_log_probs, advantages, mask) -> (losses [B, R], tuple of metrics
    [B, R]). Returns (loss, log_probs, entropy, metrics).
    """

    def __init__(self, policy: PolicyLogProbs, objective: Callable):
        super().__init__(auto_prefix=False)
        self.policy, self.objective = policy, objective

    def construct(self, prefix_ids, prefix_lengths, input_ids, targets, mask, weights, advantages, old, reference):
        x = self.policy.decoder.tokens(prefix_ids, input_ids)
        return self.from_stage(
            x, prefix_ids, prefix_lengths, input_ids, targets, mask, weights, advantages, old, reference
        )

    def from_stage(self, x, prefix_ids, prefix_lengths, input_ids, targets, mask, weights, advantages, old, reference):
        """The same from x [rows, hidden], what the stage before the last gave."""
        log_probs, entropy = self.policy.from_stage(prefix_ids, prefix_lengths, input_ids, x, targets)
        losses, metrics = self.objective(log_probs, old, reference, advantages, mask)
        return (losses * weights).sum(), log_probs, entropy, metrics


class Accumulate(nn.Cell):
    """Runs `Loss` and adds its gradients into the buffers, in place. Returns what `Loss` returns."""

    def __init__(self, loss: Loss, parameters: ParameterTuple, gradients: ParameterTuple):
        super().__init__(auto_prefix=False)
        self.gradients = gradients
        self.run = ops.value_and_grad(loss, None, weights=parameters, has_aux=True)

    def construct(self, prefix_ids, prefix_lengths, input_ids, targets, mask, weights, advantages, old, reference):
        (loss, log_probs, entropy, metrics), gradients = self.run(
            prefix_ids, prefix_lengths, input_ids, targets, mask, weights, advantages, old, reference
        )
        for i in range(len(self.gradients)):
            loss = ops.depend(loss, ops.assign_add(self.gradients[i], gradients[i]))
        return loss, log_probs, entropy, metrics
