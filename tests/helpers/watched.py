"""A feed-forward half of tests alone, with side outputs, and two updates of a small model that has it on any layout."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from layouts import assembled
from mindspore import ops
from sharded_updates import Case, batch, model_yaml
from small_model import POSITIONS, SmallModel

from mindrlhf.models import layer
from mindrlhf.models.families import FAMILIES
from mindrlhf.models.halves import COMPLETIONS, FeedForwardHalf
from mindrlhf.models.inputs import SPANS

TERM, COEFFICIENT, LAYERS, WATCHED = "kurtosis", 0.7, 3, (0, 2)


def real_rows(spans, split, asking):
    """float32[rows, 1]: 0 for rows of padding; for use in a graph."""
    n, p, _, r = split
    rows = (ops.arange(0, r).reshape((1, -1)) < spans[n:].reshape((-1, 1))).reshape((-1,))
    if asking != COMPLETIONS:
        prompts = ops.arange(0, p).reshape((1, -1)) < spans[:n].reshape((-1, 1))
        rows = ops.concat((prompts.reshape((-1,)), rows))
    return rows.astype("float32").reshape((-1, 1))


class Watched(FeedForwardHalf):
    """The usual half, which gives the mean fourth power of its normed input, and the sums of its columns."""

    sides = (TERM, "sums")

    def construct(self, x, given, split, asking):
        x = self.enter(x)
        h = self.norm(x) * real_rows(given[SPANS], split, asking)
        fourth = (h * h * h * h).mean()
        return self.leave(self._composed(x, given)), (fourth, h.sum(0))


@contextmanager
def watched():
    """Let the family's layers of `WATCHED` have this half."""
    kept = layer.HALVES, layer.FAMILIES
    choose = lambda model, number: ("attention", "watched" if number in WATCHED else "feed_forward")  # noqa: E731
    layer.HALVES = {**layer.HALVES, "watched": Watched}
    layer.FAMILIES = {"qwen2": replace(FAMILIES["qwen2"], halves=choose)}
    try:
        yield
    finally:
        layer.HALVES, layer.FAMILIES = kept


class Subject:
    """A small model in two micro-batches; a call gives its update at a rate of 0, and `gradients` are then its own."""

    def __init__(self, world, layout: dict, recompute: bool = False, coefficient: float = COEFFICIENT):
        import mindspore

        from mindrlhf.backend.comm.collectives import Collectives
        from mindrlhf.configs.grpo import OptimizerSettings, TrainSettings
        from mindrlhf.roles.part import ModelPart
        from mindrlhf.training.graphs import PolicyLogProbs
        from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD

        mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
        model = SmallModel.random(num_layers=LAYERS)
        yaml = model_yaml(Case({"micro_batch_num": 2} | layout, {}))
        yaml = yaml.model_copy(update={"recompute": yaml.recompute.model_copy(update={"recompute": recompute})})
        self.collectives = Collectives(world)
        self.side = ModelPart(yaml, model.config, self.collectives, POSITIONS)
        self.side.micro_batches = 2
        self.side.load(lambda spec: model.arrays[spec.name][self.side.partition.slices(spec)])
        objective = replace(NEGATIVE_LOG_LIKELIHOOD, terms=((TERM, coefficient),))
        head, train = PolicyLogProbs(self.side.decoder, 1.0), TrainSettings(length_bucket=16)  # one shape
        self.updater = self.side.open_updater(head, objective, OptimizerSettings(max_grad_norm=1e6), train)
        self._step, self.updater.optimizer.step = self.updater.optimizer.step, self._keep

    def _keep(self, *arguments):
        named = zip(self.updater.optimizer.parameters, self.updater.optimizer.gradients, strict=True)
        self.gradients = {parameter.name: np.array(buffer.asnumpy()) for parameter, buffer in named}
        return self._step(*arguments)

    def __call__(self):
        groups, rows = batch()
        return self.updater(groups, 0.0, weights=rows["weights"])

    def results(self) -> tuple[float, dict, list, dict]:
        """Loss, terms, side outputs and whole gradients by name."""
        update = self()
        shards = self.collectives.all_gather_object(self.gradients)
        whole = assembled(self.side.partition.trained_layout, shards)
        return update.loss, update.terms, [dict(sides) for sides in update.sides], whole
