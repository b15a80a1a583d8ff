"""Batch arithmetic of a run: prompts x samples -> updates x micro-batches."""

from mindrlhf.configs.grpo import GRPOConfig
from mindrlhf.training.batch import cut_alike


def batch_table(config: GRPOConfig, train_ranks: int, infer_ranks: int, longest_prompt: int) -> str:
    """Format one line for each quantity: over all ranks, on one, its settings.

    train_ranks, infer_ranks: data-parallel ranks that train and that generate. longest_prompt: tokens.
    Micro-batches are those of an update whose prompts and responses all have the greatest length: shorter ones make
    fewer. Settings that do not divide have been refused before (`configs.validate.check_batch`).
    """
    algorithm, sampling, samples = config.algorithm, config.dynamic_sampling, config.rollout.num_generations
    prompts, updates = config.data.prompts_per_step, algorithm.updates_per_iteration
    each = prompts // updates
    settings = config.train
    limits = (settings.max_tokens_per_micro_batch, settings.length_bucket)
    micro = cut_alike(each // train_ranks, longest_prompt, samples, config.rollout.max_new_tokens, *limits)
    rows = [
        ("one step", "in all", "per rank", ""),
        ("prompts", prompts, prompts // infer_ranks, "data.prompts_per_step"),
        ("responses", prompts * samples, prompts * samples // infer_ranks, f"x rollout.num_generations {samples}"),
        (
            "updates",
            algorithm.num_iterations * updates,
            "",
            f"algorithm.num_iterations {algorithm.num_iterations} x updates_per_iteration {updates}",
        ),
        ("  prompts", each, each // train_ranks, "of one update"),
        ("  responses", each * samples, each * samples // train_ranks, "of one update"),
        (
            "  micro-batches",
            len(micro) * train_ranks,
            len(micro),
            f"at most, {micro[0].count} prompts in each: train.max_tokens_per_micro_batch "
            f"{settings.max_tokens_per_micro_batch}",
        ),
    ]
    if sampling.enabled:
        size = sampling.prompts_per_round or prompts
        drawn = (
            f"{size} to {size * sampling.max_rounds} prompts drawn: dynamic_sampling.max_rounds {sampling.max_rounds}"
        )
        rows.insert(3, ("  of rounds", sampling.max_rounds, "", f"at most, {drawn}"))
    width = [max(len(str(row[column])) for row in rows) for column in range(3)]
    lines = [
        f"{what:<{width[0]}}  {whole!s:>{width[1]}}  {part!s:>{width[2]}}  {why}".rstrip()
        for what, whole, part, why in rows
    ]
    return "\n".join(lines)
