"""Prefilled prompts of the next requests, and their way into slots."""

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor

from mindrlhf.models.vision.batch import few_sizes
from mindrlhf.rollout.decode_graphs import EngineGraphs
from mindrlhf.rollout.prompt_arrays import PromptArrays
from mindrlhf.rollout.request import Work
from mindrlhf.shapes import padded_prefix, pool_size
from mindrlhf.types import Prompt


class PromptPool:
    """Keys and values of some requests' prompts, computed together.

    bucket: lengths are padded to its multiples.
    """

    def __init__(self, graphs: EngineGraphs, bucket: int):
        self._graphs = graphs
        self._bucket = bucket
        self._arrays = PromptArrays(graphs.prefill.decoder)
        self._shapes: list[tuple[int, int]] = []  # of prefilled prompts: number, padded length
        self.prompts: list[Work] = []
        self._prefilled = ()

    def fill(self, queue: Sequence[Work]) -> None:
        """Prefill the first prompts, in the smallest known shape that holds them.

        Without any, other ranks have some, with which this rank computes (`EngineGraphs.together`).
        """
        own = 0, 0
        if queue:
            longest = max(len(work.request.prompt.token_ids) for work in queue)
            count = min(len(queue), pool_size(self._graphs.slots, queue[0].request.samples))
            if whole := queue[0].request.whole:
                longest = self._graphs.max_prompt
                count = pool_size(self._graphs.slots, whole)
            own = count, padded_prefix(longest, self._bucket)
        needed = tuple(self._graphs.together.largest(np.array(own)).tolist())
        fitting = [shape for shape in self._shapes if shape[0] >= needed[0] and shape[1] >= needed[1]]
        if not fitting:
            self._shapes.append(needed)
        shape = min(fitting, default=needed, key=np.prod)
        first = [work for work, _ in zip(queue, range(shape[0]), strict=False)]
        arrays = self._arrays([work.request.prompt for work in first], shape)
        prefilled = self._graphs.prefill(*map(Tensor, arrays))
        if queue:
            self.prompts = first
            self._prefilled = prefilled

    def begin_anew(self, slot: int, prompt: Prompt) -> None:
        """Prefill a conversation with pictures in its response, straight into its slot.

        It is computed alone, in sizes that depend on nothing else: so are its bits. Few lengths have a graph.
        """
        buckets = padded_prefix(len(prompt.token_ids), self._bucket) // self._bucket
        size = min(few_sizes(buckets) * self._bucket, self._graphs.cache.size)
        arrays = PromptArrays(self._graphs.prefill.decoder)([prompt], (1, size))
        prefilled = self._graphs.prefill(*map(Tensor, arrays))
        places = (Tensor(np.array([place], np.int32)) for place in (slot, 0))
        self._graphs.admit_whole(*places, *prefilled)

    def copy(self, copies: Sequence[tuple[int, Work]]) -> None:
        """Copy prompts to slots."""
        size = self._graphs.admit_size
        pairs = np.array([(slot, self.prompts.index(work)) for slot, work in copies], np.int32).reshape((-1, 2))
        for first in range(0, len(pairs), size):
            part = pairs[first : first + size]
            # Padding repeats the last entry: a second copy does not change the cache.
            part = np.pad(part, ((0, size - len(part)), (0, 0)), "edge")
            self._graphs.admit(*(Tensor(places.copy()) for places in part.T), *self._prefilled)
