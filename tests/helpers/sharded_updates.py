"""Two updates of a small model on any layout, and the whole weights that come out; for `run_workers`."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
from layouts import assembled
from small_model import POSITIONS, SmallModel

TEMPERATURE = 0.7
RATES = (1e-3, 1e-3)  # larger steps make more of a difference in rounding


@dataclass(frozen=True)
class Case:
    """A layout by the keys of `parallel_config` (and `offset`), and changes to the small model.

    replays: updates replay the routing of the pass that scores. again: layers are composed, and computed again. state:
    `optimizer.state`.
    """

    layout: dict
    model: dict
    replays: bool = False
    again: bool = False
    state: str = "float32"

    @property
    def workers(self) -> int:
        return int(np.prod([self.layout.get(key, 1) for key in ("data_parallel", "model_parallel", "pipeline_stage")]))


@dataclass(frozen=True)
class Outcome:
    """What two updates gave. scores: token log-probs before them, by group and sample; weights: whole, by name."""

    losses: list[float]
    norms: list[float]
    scores: list[list[np.ndarray]]
    entropies: list[list[np.ndarray]]
    weights: dict[str, np.ndarray]


def run(world, case: Case, ranks: tuple[int, ...] = ()) -> Outcome:
    """On every rank of the layout, the same; `world` may be a single process. ranks: of the mesh, all by default."""
    import mindspore

    from mindrlhf.algorithms.losses import policy_loss
    from mindrlhf.backend.comm.collectives import Collectives
    from mindrlhf.configs.grpo import OptimizerSettings, TrainSettings
    from mindrlhf.roles.part import ModelPart
    from mindrlhf.training.first_routing import FirstRouting
    from mindrlhf.training.graphs import PolicyLogProbs
    from mindrlhf.training.objective import policy_objective
    from mindrlhf.training.scoring import Scorer

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    model = SmallModel.random(**case.model)
    collectives = Collectives(world)
    kind = type("Part", (ModelPart,), {"replays": case.replays, "records": case.replays})
    with on_ranks(ranks), composed() if case.again else contextlib.nullcontext():
        side = kind(model_yaml(case), model.config, collectives, POSITIONS)
        part = side.partition
        side.load(lambda spec: model.arrays[spec.name][part.slices(spec)])
        updates, head = (PolicyLogProbs(one, TEMPERATURE) for one in (side.decoder_for_updates(), side.decoder))
    assert bool(updates.decoder.blocks) == (case.again or part.gathered is not None)
    settings = OptimizerSettings(max_grad_norm=0.5, weight_decay=0.1, eps=1e-5, state=case.state)
    train = TrainSettings(max_tokens_per_micro_batch=80, length_bucket=16)
    objective = policy_objective(policy_loss("clip"), on_policy=False, kl="k3", beta=0.1)
    updater = side.open_updater(updates, objective, settings, train, seed=3)
    first = FirstRouting() if case.replays else None
    scorer = Scorer(head, train, side.pipeline, first)

    groups, rows = batch()
    own = {name: side.data_parallel.share(values) for name, values in rows.items()}
    mine = side.data_parallel.share(groups)
    scores = flat(side.data_parallel.gather(scorer(mine)))
    mine = first.given(mine) if first else mine
    old = side.data_parallel.share([[row + 0.1 for row in group] for group in scores])
    losses, norms, entropies = [], [], []
    for rate in RATES:
        update = updater(mine, rate, **own, old_log_probs=old, reference_log_probs=old)
        losses.append(sum(side.data_parallel.gather(update.loss)))
        norms.append(update.result.grad_norm)
        entropies.append(flat(side.data_parallel.gather(update.metrics["entropy"])))
    shards = side.collectives.all_gather_object({name: p.asnumpy() for name, p in side.parameters.items()})
    return Outcome(losses, norms, scores, entropies, assembled(part.layout, shards))


@contextlib.contextmanager
def on_ranks(ranks: tuple[int, ...]) -> Iterator[None]:
    """Meshes of model YAMLs are on these ranks, also on such that no setting gives."""
    from mindrlhf.parallel.mesh import Mesh

    made = Mesh.of_yaml
    with mock.patch.object(Mesh, "of_yaml", lambda yaml: replace(made(yaml), ranks=ranks)):
        yield


@contextlib.contextmanager
def composed() -> Iterator[None]:
    """The CPU has no fused operators but the sum over ranks."""
    from mindrlhf.backend.cpu import CPU
    from mindrlhf.backend.operators import ComposedOperators

    operators = CPU.operators()
    others = {"shared_sum": operators.shared_sum} if operators.fused else {}
    given = type("Composed", (ComposedOperators,), others)()
    with mock.patch.object(type(CPU), "operators", return_value=given):
        yield


def model_yaml(case: Case):
    """The settings of a layout, as from a file."""
    from mindrlhf.configs.model_settings import ModelSettings
    from mindrlhf.configs.model_yaml import ContextSettings, ModelYaml, ParallelSettings, RecomputeSettings

    layout = dict(case.layout)
    model = ModelSettings(offset=layout.pop("offset", 0), compute_dtype="float32")
    parallel = ParallelSettings(**{"micro_batch_num": 4} | layout)
    return ModelYaml(
        path="layout.yaml",
        model=model,
        parallel=parallel,
        recompute=RecomputeSettings(recompute=case.again),
        context=ContextSettings(device_target="CPU"),
    )


def batch():
    """Four groups of three responses of uneven length, and what an update takes with them."""
    from mindrlhf.training.batch import SequenceGroup

    rng = np.random.default_rng(5)
    groups = []
    for number, size in enumerate((5, 9, 3, 7)):
        lengths = rng.integers(2, 14, 3)
        groups.append(
            SequenceGroup(
                rng.integers(0, 64, size).astype(np.int32),
                tuple(rng.integers(0, 64, n).astype(np.int32) for n in lengths),
                identity=(number,),
            )
        )
    total = sum(len(response) for group in groups for response in group.responses)

    def rows(draw):
        return [[draw(len(response)).astype(np.float32) for response in group.responses] for group in groups]

    return groups, {
        "weights": rows(lambda n: np.full(n, 1 / total)),
        "advantages": rows(lambda n: np.full(n, rng.normal())),
    }


def flat(parts: list) -> list:
    return [item for part in parts for item in part]
