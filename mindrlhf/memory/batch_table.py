"""Batch arithmetic of a run: prompts x samples -> updates x micro-batches."""

from mindrlhf.files.text import aligned
from mindrlhf.memory.work import Work


def batch_table(work: Work) -> str:
    """Format one line per quantity: over all ranks, on one rank, its settings.

    Micro-batches are counted for an update whose prompts and responses all have the greatest length: shorter ones need
    fewer. Settings that do not divide have been refused before (`configs.validate.check_batch`).
    """
    config = work.config
    micro = work.micro_batches("update")
    prompts = config.data.prompts_per_step
    samples = config.rollout.num_generations
    drawn = config.dynamic_sampling
    iterations = config.algorithm.num_iterations
    updates = config.algorithm.updates_per_iteration
    trains = work.train.parallel.data_parallel
    infers = work.infer.parallel.data_parallel
    each = prompts // updates
    tokens = f"train.max_tokens_per_micro_batch {config.train.max_tokens_per_micro_batch}"
    passes = f"algorithm.num_iterations {iterations} x updates_per_iteration {updates}"
    rows = [
        ("one step", "in all", "per rank", ""),
        ("prompts", prompts, prompts // infers, "data.prompts_per_step"),
        ("responses", prompts * samples, prompts * samples // infers, f"x rollout.num_generations {samples}"),
        ("updates", iterations * updates, "", passes),
        ("  prompts", each, each // trains, "of one update"),
        ("  responses", each * samples, each * samples // trains, "of one update"),
        ("  micro-batches", len(micro) * trains, len(micro), f"at most, {micro[0].count} prompts in each: {tokens}"),
    ]
    if drawn.enabled:
        size = drawn.prompts_per_round or prompts
        most = drawn.max_rounds
        why = f"at most, {size} to {size * most} prompts drawn: dynamic_sampling.max_rounds {most}"
        rows.insert(3, ("  of rounds", most, "", why))
    lines = aligned(row[:3] for row in rows).splitlines()
    return "\n".join(f"{line}  {why}".rstrip() for line, (*_, why) in zip(lines, rows, strict=True))
