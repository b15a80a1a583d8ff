"""The trained weights of a rank: what updates them, what brings them to the graphs that generate, what saves them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from mindspore import Parameter, Tensor, nn

from mindrlhf import backend
from mindrlhf.checkpoint.finite import first_not_finite, spoiled
from mindrlhf.checkpoint.hf import generation_defaults, save_hf
from mindrlhf.checkpoint.open import hf_folder, stopping_config
from mindrlhf.configs.grpo import OptimizerSettings, TrainSettings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.memory.residency import BLOCK_NUMBERS
from mindrlhf.models.parameters import parameter_table
from mindrlhf.reshard.online import OnlineReshard, ReshardStatistics, gather_full
from mindrlhf.reshard.plan import plan
from mindrlhf.roles.part import Side
from mindrlhf.training.objective import Objective
from mindrlhf.training.optimizer import AdamW, ReplicaShare, ShardedNorm
from mindrlhf.training.updater import Updater

Parameters = dict[str, Parameter]


def open_updater(
    optimizer_settings: OptimizerSettings,
    train_settings: TrainSettings,
    head: nn.Cell,
    objective: Objective,
    parameters: Parameters,
    training: Side,
    in_blocks: bool = False,
) -> Updater:
    """What minimises an objective over this rank's part of the model, together with the other ranks.

    head: see `training.graphs`, over the part's decoder. parameters: the part's. in_blocks: the optimizer's moments may
    come and go while it updates.
    """
    part = training.partition
    norm = ShardedNorm(training.counted, training.sum_over_replica) if part.mesh.pp * part.mesh.tp > 1 else None
    block = BLOCK_NUMBERS if in_blocks else None
    share = replica_share(parameters, training) if part.shared_optimizer else None
    optimizer = AdamW(
        optimizer_settings,
        [parameters[spec.name] for spec in part.specs],
        part.specs,
        norm,
        share,
        block,
        head.decoder.kernels.best,
    )
    return Updater(
        head,
        objective,
        optimizer,
        train_settings,
        training.gradient_reducer(optimizer.gradients),
        training.pipeline,
        training.micro_batches,
    )


def replica_share(parameters: Parameters, training: Side) -> ReplicaShare:
    """The rows that this data-parallel replica updates, and what brings them to the others."""
    part = training.partition
    kept, rows = {}, []
    for spec in part.specs:
        parameter, own = parameters[spec.name], part.updated_rows(spec)
        rows.append(own)
        kept[spec.name] = parameter
        if own.stop - own.start < parameter.shape[0]:
            values = np.ascontiguousarray(backend.read(parameter)[own])
            kept[spec.name] = Parameter(Tensor(values), name=f"share.{spec.name}", requires_grad=False)
    moves = plan(part.optimizer_layout, part.layout)
    reshard = OnlineReshard(moves, training.collectives, kept, parameters)
    return ReplicaShare(list(kept.values()), rows, reshard.run)


def published_weights(
    policy: Parameters, training: Side, generating: Side, verify: bool
) -> tuple[Parameters, Callable[[], ReshardStatistics] | None]:
    """The weights that generate, and what brings them up to date with `policy` after an update; None for equal layouts.

    A parameter of which this rank holds the same part on both sides is one and the same; nothing moves for it.
    verify: see `OnlineReshard.run`.
    """
    here, there = training.partition, generating.partition
    if here.layout == there.layout:
        return policy, None
    moves = plan(here.layout, there.layout)
    answering = {
        spec.name: policy[spec.name]
        if here.slices(spec) == there.slices(spec)
        else Parameter(Tensor(np.empty(there.shape(spec), np.float32)), name=f"infer.{spec.name}", requires_grad=False)
        for spec in there.specs
    }
    reshard = OnlineReshard(moves, training.collectives, policy, answering)
    reshard.run(verify)
    return answering, partial(reshard.run, verify)


def save_model(
    directory: Path,
    policy: Parameters,
    training: Side,
    tokenizer: Tokenizer,
    what: str,
    source: str | None = None,
    card: str | None = None,
) -> None:
    """Write a whole model as an HF directory, from all ranks, a parameter at a time.

    what: for messages. source: path of the first weights, whose sampling defaults go on. card: text of the model card.
    Raises `UserError` on all ranks where a weight is not finite; what the folder held stays then.
    """
    part = training.partition
    broken = first_not_finite(backend.read_all(policy), part.layout.placements, training.collectives.all_reduce_max)
    if broken:
        raise UserError(f"{directory}: {spoiled(what, broken)}.")
    gathered = gather_full(part.layout, training.collectives, policy)
    if part.rank == 0:
        tensors = ((spec, array) for spec, (_, array) in zip(parameter_table(part.model), gathered, strict=True))
        config, generation = stopping_config(tokenizer, part.model), generation_defaults(source and hf_folder(source))
        save_hf(directory, config, tensors, tokenizer=tokenizer, replace=True, generation=generation, card=card)
        print(f"the {what} is in {directory}", flush=True)
    else:
        for _ in gathered:
            pass
