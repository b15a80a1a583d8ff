"""Command lines with one odd value: settings over the YAMLs, and flags."""

import random

from hostile.mutations import ESCAPES

ODD_TEXTS = (
    *("", " ", "-1", "0", "-0.5", "1e30", "1" + "0" * 30, "7" * 5000, "nan", ".nan", "inf", "-.inf", "1e-320", "1e400"),
    *(
        "null",
        "true",
        "twelve",
        "[]",
        "[1, [2]]",
        "{}",
        "{a: {b: 1}}",
        "{",
        "'",
        "&a [*a]",
        "*a",
        "!!python/object:x y",
    ),
    *("x" * 20_000, ESCAPES, "a\nb", "a\udc80b", "\u202eabc", "../outside", "/dev/null/x", "[" * 3000, "{a: " * 3000),
    *("2026-13-45", "0x", "1_000", "=", "a=b", "%s", "{0}", "$(id)", "hf", "world", "train.yaml", "."),
)
YAML_KEYS = (
    *(f"model.model_config.{key}" for key in ("num_layers", "hidden_size", "eos_token_id", "offset", "type", "theta")),
    *(f"parallel_config.{key}" for key in ("model_parallel", "data_parallel", "pipeline_stage", "micro_batch_num")),
    *("context.device_target", "context.max_device_memory", "recompute_config.recompute", "unknown"),
)
# Flags that take a value; none of those whose great values ask for processes or memory, as they say.
FLAGS = {
    "data": ("--max_prompt_length", "--seq_length", "--pad_token_id", "--dataset_type", "--template", "--truncation"),
    "show": ("--step", "--prompt", "--prompts", "--samples"),
    "report": ("--samples", "--sample_steps", "--labels", "--refresh"),
    "plot": ("--accuracy", "--labels", "--metric", "--title"),
    "plan": ("--prompt_tokens", "--from-verl", "--grpo_config", "--load_sft_checkpoint_infer", "--mind_dataset_dir"),
    "train": ("--resume_training", "--replay", "--use_parallel", "--load_ref_checkpoint", "--from-verl"),
    "sft": ("--load_sft_checkpoint_train", "--sft_config", "--mind_dataset_dir"),
    "eval": ("--limit", "--num_generations", "--temperature", "--top_p", "--top_k", "--seed", "--reward", "--compare"),
    "generate": ("--limit", "--num_generations", "--seed", "--step", "--prompts"),
    "convert": ("--dtype", "--config_path"),
    "transform": ("--world_size", "--rank_id", "--prefix", "--dst_strategy", "--output_format"),
    "export": ("--checkpoint", "--dtype", "--role"),
    "reward-check": ("--rows", "--timeout", "--reward", "--dataset_type", "--completion", "--max_new_tokens"),
}


def odd_arguments(rng: random.Random, argv: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """The command line with one setting or flag more, and what it is."""
    value = rng.choice(ODD_TEXTS)
    if argv[0] in ("plan", "train", "sft", "generate") and rng.random() < 0.8:
        command = "plan" if argv[0] == "train" else argv[0]  # `plan` refuses what `train` does, and starts nothing
        setting = rng.choice(_settings(command))
        return (command, *argv[1:], f"{setting}={value}"), f"{setting}={value[:40]!r}"
    flag = rng.choice(FLAGS[argv[0]])
    return (*argv, f"{flag}={value}"), f"{flag}={value[:40]!r}"


def _settings(command: str) -> list[str]:
    from mindrlhf.configs.grpo import GRPOSettings, SamplingSettings
    from mindrlhf.configs.sft import SFTSettings

    kind = {"generate": SamplingSettings, "sft": SFTSettings}.get(command, GRPOSettings)
    names = list(_leaves(kind().model_dump(mode="json")))
    if command != "generate":
        roles = ("train",) if command == "sft" else ("train", "infer")
        names += [f"{role}_yaml.{key}" for role in roles for key in YAML_KEYS]
    return names


def _leaves(values: dict, prefix: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        found += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]
    return found
