"""TRL's keyword arguments as settings: values, batch arithmetic, and a place for every key that TRL has."""

import dataclasses
import math
import re

import pytest

from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.loading import load_settings
from mindrlhf.errors import UserError
from mindrlhf.migration.trl.grpo import LOSSES, PRESET, translate_grpo
from mindrlhf.migration.trl.names import METRICS, NEEDLESS, NOT_DONE, trl_names
from mindrlhf.migration.trl.translation import RunSizes

# Keys of TRL's GRPOConfig itself, with their defaults, in several of its versions.
GRPO_KEYS = {
    "model_init_kwargs": None,
    "disable_dropout": False,
    "cast_lm_head_to_fp32": False,
    "num_generations": 8,
    "num_generations_eval": None,
    "max_prompt_length": None,
    "max_completion_length": 256,
    "ds3_gather_for_generation": True,
    "shuffle_dataset": True,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "generation_kwargs": None,
    "chat_template_kwargs": None,
    "repetition_penalty": 1.0,
    "use_transformers_paged": False,
    "cache_implementation": None,
    "use_vllm": False,
    "vllm_mode": "server",
    "vllm_model_impl": "vllm",
    "vllm_structured_outputs_regex": None,
    "vllm_server_base_url": None,
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "vllm_server_timeout": 240.0,
    "vllm_group_port": 51216,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_max_model_length": None,
    "vllm_tensor_parallel_size": 1,
    "vllm_enable_sleep_mode": False,
    "beta": 0.0,
    "num_iterations": 1,
    "epsilon": 0.2,
    "delta": None,
    "epsilon_high": None,
    "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0,
    "importance_sampling_level": "token",
    "reward_weights": None,
    "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group",
    "loss_type": "dapo",
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "top_entropy_quantile": 1.0,
    "max_tool_calling_iterations": None,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_cap": 3.0,
    "off_policy_mask_threshold": None,
    "use_bias_correction_kl": True,
    "log_completions": False,
    "num_completions_to_print": None,
    "log_unique_prompts": False,
    "log_completions_hub_repo": None,
}


def settings(devices=1, rows=None, own=(), **keys) -> GRPOSettings:
    """The typed settings that TRL's keys give, over TRL's defaults."""
    base = load_settings(GRPOSettings, PRESET)
    return load_settings(GRPOSettings, PRESET, given=translated(base, devices, rows, own, **keys).layer())


def translated(base, devices=1, rows=None, own=(), **keys):
    return translate_grpo(keys, base, own, RunSizes(devices, rows))


def refused(*devices_and_rows, **keys) -> str:
    with pytest.raises(UserError) as caught:
        settings(*devices_and_rows, **keys)
    message = str(caught.value)
    assert message.startswith("GRPOConfig: ")
    assert message.endswith((".", "?"))
    assert "\n" not in message
    return message


def test_trl_s_defaults_change_nothing():
    """Each key with TRL's own default gives the preset, whose values are those."""
    expected = load_settings(GRPOSettings, PRESET).model_dump()
    for key, value in GRPO_KEYS.items():
        found = settings(**{key: value}).model_dump()
        differing = [
            f"{group}.{name}"
            for group, values in found.items()
            if isinstance(values, dict)
            for name, one in values.items()
            if one != expected[group][name]
        ]
        # Our null stands for what a method has of itself; TRL's value is given here.
        same = {"advantage_std", "epsilon_low", "epsilon_high", "importance_level", "max_new_tokens"}
        assert {name.partition(".")[2] for name in differing} <= same, (key, differing)


def test_every_key_of_transformers_has_a_place():
    arguments = pytest.importorskip("transformers").TrainingArguments
    base, named = load_settings(GRPOSettings, PRESET), []
    for one in dataclasses.fields(arguments):
        default = one.default if one.default is not dataclasses.MISSING else one.default_factory()
        if one.name in ("output_dir", "learning_rate", "lr_scheduler_type", "optim") or one.name.startswith("_"):
            continue  # a trainer's own, and those with another default in TRL
        translated(base, **{one.name: default})
        named.append(one.name)
    assert len(named) > 80


def test_no_key_has_two_places():
    names = {name.partition("=")[0] for name in trl_names(GRPOSettings)}
    assert not names & NEEDLESS.keys()
    assert not names & NOT_DONE.keys()
    assert not NEEDLESS.keys() & NOT_DONE.keys()


@pytest.mark.parametrize(
    ("devices", "keys", "prompts", "updates"),
    [
        (1, {}, 1, 1),
        (1, {"num_generations": 4}, 2, 1),
        (1, {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4}, 8, 1),
        (4, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 16}, 2, 1),
        (1, {"steps_per_generation": 4}, 4, 4),
        (2, {"gradient_accumulation_steps": 2, "steps_per_generation": 8}, 16, 4),
        (1, {"generation_batch_size": 64, "gradient_accumulation_steps": 4}, 8, 2),
    ],
)
def test_batch_arithmetic(devices, keys, prompts, updates):
    """Completions of a generation / num_generations, and the updates that it is cut into."""
    found = settings(devices, **keys)
    assert (found.data.prompts_per_step, found.algorithm.updates_per_iteration) == (prompts, updates)


def test_steps_are_updates():
    """Eight updates on one generation: TRL's 80 steps are 10 of ours, and the schedule counts updates in both."""
    keys = {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 80, "save_steps": 16, "logging_steps": 8}
    found = settings(**keys, eval_strategy="steps", eval_steps=40, warmup_ratio=0.1, sync_ref_model=True, beta=0.1)
    trainer = found.trainer
    assert (trainer.total_steps, trainer.save_freq, trainer.log_every, trainer.test_freq) == (10, 2, 1, 5)
    assert found.optimizer.warmup_steps == 8
    assert (found.algorithm.reference_sync_steps, found.algorithm.reference_sync_share) == (64, 0.6)
    message = refused(steps_per_generation=4, max_steps=10)
    assert (
        message == "GRPOConfig: max_steps is 10, which 4 updates of a step here (4) does not divide; set it to 8 or 12."
    )


def test_numbers_that_follow_from_the_rows():
    keys = {"per_device_train_batch_size": 32, "warmup_ratio": 0.05, "eval_strategy": "epoch", "save_steps": 0.5}
    found = settings(1, 100, **keys, num_train_epochs=2)  # 4 prompts a step: 25 steps an epoch
    assert (found.trainer.epochs, found.trainer.total_steps, found.trainer.test_freq) == (2, None, 25)
    assert (found.optimizer.warmup_steps, found.trainer.save_freq) == (math.ceil(0.05 * 50), 25)
    assert settings(1, 100, per_device_train_batch_size=32, num_train_epochs=0.5).trainer.total_steps == 13
    assert settings(1, None, max_steps=40, warmup_ratio=0.1).optimizer.warmup_steps == 4
    assert "warmup_ratio is 0.1, and the number of rows is not known; give max_steps" in refused(warmup_ratio=0.1)
    base = load_settings(GRPOSettings, PRESET)
    assert "optimizer.warmup_steps" not in translated(base, None, None, warmup_ratio=0.1).placed  # not asked for yet


@pytest.mark.parametrize("name", LOSSES)
def test_loss_types(name):
    more = {"importance_sampling_level": "sequence"} if name == "luspo" else {}
    algorithm = settings(loss_type=name, epsilon=0.1, epsilon_high=5.0 if name == "cispo" else 0.3, **more).algorithm
    expected = {
        "grpo": ("clip", "seq-mean-token-mean", 0.1, 0.3),
        "dapo": ("clip", "token-mean", 0.1, 0.3),
        "bnpo": ("clip", "token-mean", 0.1, 0.3),
        "dr_grpo": ("clip", "dr_grpo", 0.1, 0.3),
        "luspo": ("clip", "seq-mean-token-sum", 0.1, 0.3),
        "cispo": ("cispo", "token-mean", None, 5.0),
        "sapo": ("sapo", "token-mean", None, None),  # the loss has an aggregation of its own
    }
    found = algorithm.policy_loss, algorithm.aggregation, algorithm.epsilon_low, algorithm.epsilon_high
    assert found == expected[name]
    assert algorithm.cispo_cap == ("absolute" if name == "cispo" else None)
    assert algorithm.loss()


def test_what_follows_from_several_keys():
    assert settings(epsilon=0.1).algorithm.epsilon_high == 0.1
    assert settings(scale_rewards=False).algorithm.advantage_std == "none"
    assert settings(scale_rewards=True).algorithm.advantage_std == "group"
    assert settings(multi_objective_aggregation="normalize_then_sum").algorithm.normalize_functions is True
    assert settings(max_tool_calling_iterations=3).rollout.max_turns == 4
    assert settings(num_generations_eval=4, temperature=0.7).validation.temperature == 0.7
    assert settings(report_to="none").trainer.loggers == ("console", "jsonl")
    assert settings(report_to=["wandb", "tensorboard"]).trainer.loggers == ("console", "jsonl", "wandb", "tensorboard")
    assert settings(report_to="all").trainer.loggers == settings().trainer.loggers
    assert settings(log_completions=True, logging_steps=5).trainer.log_completions_every == 5
    assert settings(save_strategy="no").trainer.save_freq is None
    assert (
        settings(metric_for_best_model="reward", greater_is_better=True).trainer.save_best_metric == METRICS["reward"]
    )
    assert settings(disable_tqdm=True).trainer.progress is False
    sampling = settings(generation_kwargs={"stop": "</answer>", "min_tokens": 2}).rollout
    assert (sampling.stop_strings, sampling.min_new_tokens) == (("</answer>",), 2)
    rate = settings(
        learning_rate=2e-6, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1}
    )
    assert (rate.optimizer.lr_decay, rate.optimizer.min_lr) == ("cosine", pytest.approx(2e-7))
    correction = settings(
        use_vllm=True, vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_cap=2.0
    )
    assert correction.rollout_correction.model_dump() == {
        "level": "token",
        "mode": "truncate",
        "upper": 2.0,
        "lower": 0.0,
    }


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"])
def test_optimizers_of_eight_bits_have_such_moments(name):
    assert settings(1, None, optim=name).optimizer.state == "int8"
    assert settings(1, None, optim="adamw_torch_fused").optimizer.state == "float32"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"lerning_rate": 1}, "unknown key lerning_rate; did you mean learning_rate?"),
        ({"qqq": 1}, "unknown key qqq; give one of TRL's, or a setting as group.key."),
        ({"top_entropy_quantile": 0.2}, "is 0.2, which is not done here; set it to 1.0"),
        ({"push_to_hub_token": "a"}, "give hub_model_id, with the owner in it, and hub_token"),
        ({"loss_type": "vespo"}, "loss_type is 'vespo', which is not done here; set it to one of grpo, dapo"),
        ({"loss_type": "luspo"}, "which needs importance_sampling_level='sequence'; set it too"),
        ({"loss_type": "bnpo", "gradient_accumulation_steps": 2}, "set it to dapo, the mean over all"),
        ({"lr_scheduler_type": "polynomial"}, "set it to one of constant, constant_with_warmup, linear, cosine"),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "num_cycles is not done here; give min_lr or min_lr_rate"),
        ({"optim": "adafactor"}, "AdamW is the only optimizer here; set it to adamw_torch or adamw_8bit"),
        ({"optim": "adamw_torch_4bit"}, "AdamW is the only optimizer here; set it to adamw_torch or adamw_8bit"),
        ({"eval_strategy": "always"}, "set it to no, steps or epoch"),
        ({"metric_for_best_model": "eval_loss"}, "give ours: val-core/<source>/acc/mean@1 for example"),
        ({"generation_kwargs": {"num_beams": 4}}, "num_beams is not done here; give any of stop"),
        ({"max_completion_length": None}, "a limit is needed here; give a number of tokens"),
        ({"multi_objective_aggregation": "sum"}, "set it to sum_then_normalize or normalize_then_sum"),
        ({"learning_rate": -1.0}, "learning_rate: optimizer.lr is -1.0, and must be a number, at least 0"),
        ({"report_to": "trackio!"}, "report_to: trainer.loggers.2 is 'trackio!', and must be one of"),
        ({"num_generations": 3}, "are 8 completions, which num_generations 3 does not divide; set per_device_train_"),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "set it to 2 or 4"),
        ({"generation_batch_size": 12}, "does not divide; set it to 8 or 16"),
        (
            {"generation_batch_size": 8, "steps_per_generation": 1},
            "steps_per_generation is given; leave one of them out",
        ),
    ],
)
def test_one_sentence_for_each_mistake(keys, words):
    assert words in refused(**keys)


def test_a_batch_size_that_would_be_right():
    message = refused(2, num_generations=16, per_device_train_batch_size=3, gradient_accumulation_steps=2)
    size = int(re.search(r"set per_device_train_batch_size to (\d+)", message)[1])
    found = settings(2, num_generations=16, per_device_train_batch_size=size, gradient_accumulation_steps=2)
    assert found.data.prompts_per_step == 1


def test_our_prompts_go_before_trl_s_arithmetic():
    base = load_settings(GRPOSettings, PRESET, ["data.prompts_per_step=6", "algorithm.updates_per_iteration=2"])
    result = translated(base, own=("data.prompts_per_step",), max_steps=10)
    assert result.placed["trainer.total_steps"][0] == 5
    assert "data.prompts_per_step" not in result.placed
    with pytest.raises(UserError, match=r"data\.prompts_per_step is given; leave one of them out"):
        translated(base, own=("data.prompts_per_step",), per_device_train_batch_size=8)


def test_what_has_no_effect_is_told():
    base = load_settings(GRPOSettings, PRESET)
    result = translated(base, bf16=True, use_vllm=True, vllm_mode="colocate", sapo_temperature_pos=1.0)
    assert result.needless.keys() == {"bf16", "use_vllm", "vllm_mode", "sapo_temperature_pos"}
    assert result.placed.keys() == {"data.prompts_per_step", "algorithm.updates_per_iteration"}


def names_of(cell: str) -> set[str]:
    """Metrics of a table's cell; a short one has the beginning of the one before it."""
    found: list[str] = []
    for name in re.findall("`([^`]+)`", cell):
        short = found and "/" not in name and "/" in found[-1]
        found.append(f"{found[-1].rpartition('/')[0]}/{name}" if short else name)
    return {name.replace("<function>", "*") for name in found}


def test_metrics_are_those_of_the_page(root):
    """docs/metrics.md has the same names of TRL beside ours."""
    cells = [
        line.split("|")[1:4] for line in (root / "docs" / "metrics.md").read_text().splitlines() if line[:2] == "| "
    ]
    rows = [(names_of(row[0]), names_of(row[2])) for row in cells if len(row) == 3]
    for theirs, ours in METRICS.items():
        assert any(ours in first and theirs in second for first, second in rows), (theirs, ours)
    assert {name for _, second in rows for name in second} == METRICS.keys()
