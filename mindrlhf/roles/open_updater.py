"""Updater of a part: one optimizer over its shard and the other ranks'."""

import numpy as np
from mindspore import Parameter, Tensor, nn

from mindrlhf import backend
from mindrlhf.configs.grpo import OptimizerSettings, TrainSettings
from mindrlhf.memory.residency import BLOCK_NUMBERS
from mindrlhf.parallel.gradients import ReduceGradients
from mindrlhf.reshard.online import OnlineReshard
from mindrlhf.reshard.plan import plan
from mindrlhf.roles.part import ModelPart
from mindrlhf.training.objective import Objective
from mindrlhf.training.optimizer import AdamW, ReplicaShare, ShardedNorm
from mindrlhf.training.updater import Updater


def open_updater(
    part: ModelPart,
    head: nn.Cell,
    objective: Objective,
    optimizer_settings: OptimizerSettings,
    train_settings: TrainSettings,
    in_blocks: bool = False,
) -> Updater:
    """Open an updater that minimises an objective over a part's parameters that train.

    head: see `training.graphs`, over the part's decoder. in_blocks: the optimizer's moments may come and go while it
    updates.
    """
    shard = part.partition
    counted = [shard.counts(spec) for spec in shard.trained]
    optimizer = AdamW(
        optimizer_settings,
        [part.parameters[spec.name] for spec in shard.trained],
        shard.trained,
        ShardedNorm(counted, part.sum_over_replica) if shard.mesh.pp * shard.mesh.tp > 1 else None,
        replica_share(part) if shard.shared_optimizer else None,
        BLOCK_NUMBERS if in_blocks else None,
        head.decoder.kernels.best,
    )
    groups, buckets = shard.gradient_groups(), part.yaml.parallel.gradient_aggregation_group
    reduce = ReduceGradients(optimizer.gradients, groups, part.collectives, buckets) if groups else None
    return Updater(head, objective, optimizer, train_settings, reduce, part.pipeline, part.micro_batches)


def replica_share(part: ModelPart) -> ReplicaShare:
    """Select this data-parallel replica's rows, and plan their way to the others.

    The replica updates these rows.
    """
    shard, updated, rows = part.partition, {}, []
    for spec in shard.trained:
        parameter, own = part.parameters[spec.name], shard.updated_rows(spec)
        rows.append(own)
        updated[spec.name] = parameter
        if own.stop - own.start < parameter.shape[0]:
            values = np.ascontiguousarray(backend.read(parameter)[own])
            updated[spec.name] = Parameter(Tensor(values), name=f"share.{spec.name}", requires_grad=False)
    moves = plan(shard.optimizer_layout, shard.trained_layout)
    reshard = OnlineReshard(moves, part.collectives, updated, part.parameters)
    return ReplicaShare(list(updated.values()), rows, reshard.run)
