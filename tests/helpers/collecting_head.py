"""A head whose gradient goes into a buffer."""

import numpy as np
from mindspore import Parameter, Tensor, nn

from mindrlhf.models.head import TokenLogProbs
from mindrlhf.models.weight import Weight


class CollectingHead(nn.Cell):
    """`TokenLogProbs` with a head and its buffer [V, H], both 0: (hidden, targets, used) -> its outputs."""

    def __init__(self, vocabulary: int, width: int, token_log_probs: TokenLogProbs):
        super().__init__(auto_prefix=False)
        zeros = np.zeros((vocabulary, width), np.float32)
        self.head, self.buffer = (Parameter(Tensor(zeros), name=name) for name in ("head", "buffer"))
        self.weight, self.token_log_probs = Weight(self.head), token_log_probs

    def construct(self, hidden, targets, used):
        if self.token_log_probs.fused:
            return self.token_log_probs(hidden, self.weight.parameter, targets, used, self.weight.collected)
        head, hidden = self.weight(hidden)
        return self.token_log_probs(hidden, head, targets, used)
