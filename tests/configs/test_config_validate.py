"""Checks across settings: each failure names the file or key, the values, and a fix that then passes."""

import pytest

from mindrlhf.algorithms.advantages import ADVANTAGES
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_settings import ModelSettings
from mindrlhf.configs.model_yaml import ContextSettings, ModelYaml, ParallelSettings, RecomputeSettings
from mindrlhf.configs.sft import SFTDataSettings, SFTSettings
from mindrlhf.configs.validate import (
    check_grpo,
    check_layout,
    check_lengths,
    check_sft,
    check_training_layout,
)
from mindrlhf.errors import UserError

COMPARING = [name for name, method in ADVANTAGES.items() if method.compares]
MODEL = ModelConfig(
    vocab_size=96,
    hidden_size=192,
    intermediate_size=192,
    num_layers=4,
    num_heads=12,
    num_kv_heads=4,
    head_dim=16,
    max_position_embeddings=512,
)


def yaml(path="train.yaml", target="CPU", model=None, **parallel):
    settings = ModelSettings(**(model or {}))
    return ModelYaml(
        path=path, model=settings, parallel=ParallelSettings(**parallel), context=ContextSettings(device_target=target)
    )


def check(overrides=(), train=None, infer=None, train_model=MODEL, infer_model=MODEL, workers=1):
    train, infer = train or yaml(), infer or yaml("infer.yaml")
    check_grpo(load_grpo_config(None, overrides), train, infer, train_model, infer_model, workers)


def refused(call, *arguments, **named):
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", ")."))
    return message


def test_the_defaults_pass():
    check()


@pytest.mark.parametrize(
    ("layout", "workers"),
    [
        ({"data_parallel": 2}, 1),
        ({}, 2),
        ({"data_parallel": 2, "model_parallel": 4, "pipeline_stage": 2, "micro_batch_num": 2}, 8),
    ],
)
def test_the_layouts_product_must_be_the_worker_count(layout, workers):
    product = layout.get("data_parallel", 1) * layout.get("model_parallel", 1) * layout.get("pipeline_stage", 1)
    message = refused(check_layout, yaml(**layout), MODEL, workers)
    assert message.startswith("train.yaml: data_parallel ")
    assert f"is {product}, and the workers started are {workers};" in message
    assert f"msrun --worker_num={product}" in message
    check_layout(yaml(**layout), MODEL, product)


def test_both_yamls_layouts_are_checked():
    for broken in ("train", "infer"):
        two = {broken: yaml(f"{broken}.yaml", data_parallel=2)}
        assert refused(check, **two).startswith(f"{broken}.yaml: data_parallel 2")


def test_generation_has_one_stage():
    train, infer = yaml(data_parallel=2), yaml("infer.yaml", pipeline_stage=2, micro_batch_num=2)
    message = refused(check, train=train, infer=infer, workers=2)
    assert message.startswith("infer.yaml: parallel_config.pipeline_stage is 2")
    assert "set it to 1" in message


@pytest.mark.parametrize(
    ("ranks", "changes", "words"),
    [
        (5, {}, "does not divide num_heads 12; set model_parallel to one of 1, 2, 4."),
        (
            8,
            {"num_heads": 16, "hidden_size": 100},
            "does not divide hidden_size 100; set model_parallel to one of 1, 2, 4.",
        ),
        (2, {"intermediate_size": 191}, "does not divide intermediate_size 191; set model_parallel to one of 1."),
        (4, {"vocab_size": 98}, "does not divide vocab_size 98; set model_parallel to one of 1, 2."),
        (6, {}, "and n_kv_heads 4 do not divide one another; set model_parallel to one of 1, 2, 4."),
    ],
)
def test_tensor_parallelism_must_divide_the_model(ranks, changes, words):
    model = ModelConfig(**{**MODEL.model_dump(), **changes})
    message = refused(check_layout, yaml(model_parallel=ranks), model, ranks)
    assert message.startswith(f"train.yaml: parallel_config.model_parallel {ranks} ")
    assert words in message
    for right in words.rpartition("one of ")[2].rstrip(".").split(", "):
        check_layout(yaml(model_parallel=int(right)), model, int(right))


@pytest.mark.parametrize(
    ("setting", "target", "stages", "followed"),
    [
        (True, "CPU", 1, True),
        (4, "CPU", 1, True),
        ((2, 0), "CPU", 1, True),
        (((0, 0), (1, 0)), "CPU", 1, True),
        ((0, 0), "CPU", 1, None),
        (False, "Ascend", 1, None),
        (0, "Ascend", 2, None),
        (True, "Ascend", 2, True),
        ((7, 7), "Ascend", 2, False),
        (3, "CPU", 2, False),
        (True, "Ascend", 1, True),
        ((7, 7), "Ascend", 1, True),
    ],
)
def test_recomputation_of_some_layers_is_a_hint(setting, target, stages, followed):
    """A hint that is not followed is listed. followed: None for settings that ask for nothing."""
    given = yaml(target=target, pipeline_stage=stages, micro_batch_num=stages)
    given = given.model_copy(update={"recompute": RecomputeSettings(recompute=setting)})
    check_training_layout(given, 32)
    assert given.recomputes == (followed is True and stages == 1)
    assert ("recompute_config.recompute" in given.without_effect(generating=False)) == (followed is False)


def test_key_value_heads_may_be_fewer_than_the_ranks_that_share_them():
    check_layout(yaml(model_parallel=12), MODEL, 12)


def test_stages_are_no_more_than_layers_and_all_have_work():
    message = refused(check_layout, yaml(pipeline_stage=5, micro_batch_num=5), MODEL, 5)
    assert "pipeline_stage 5 is more than the model's 4 layers; set it to 4 or fewer" in message
    message = refused(check_layout, yaml(pipeline_stage=4, micro_batch_num=2), MODEL, 4)
    assert "micro_batch_num 2 is fewer than pipeline_stage 4" in message
    assert "set it to 4 or more" in message


@pytest.mark.parametrize("key", ["compute_dtype", "param_init_type", "layernorm_compute_type", "softmax_compute_type"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_on_cpu_is_that_of_products_alone(key, dtype):
    """The other parts are float32 there, which is listed and loses nothing."""
    infer = yaml("infer.yaml", model={key: dtype})
    if (key, dtype) == ("compute_dtype", "float16"):
        assert refused(check, infer=infer) == (
            "infer.yaml: model.model_config.compute_dtype is float16, and device_target CPU computes in float32 or "
            "bfloat16 only; set it to float32 or bfloat16."
        )
    else:
        check(infer=infer)
    listed = f"model.model_config.{key}" in infer.without_effect(generating=True)
    assert listed == (key != "compute_dtype")
    on_ascend = yaml("infer.yaml", target="Ascend", model={key: dtype})
    check(train=yaml(target="Ascend"), infer=on_ascend)
    assert on_ascend.without_effect(generating=True) == []


def test_both_yamls_name_one_device_target():
    message = refused(check, train=yaml(target="Ascend"))
    assert message.startswith("infer.yaml: context.device_target is CPU, and train.yaml has Ascend")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 3}, "num_layers is 3 (train.yaml has 4)"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05 (train.yaml has 1e-06)"),
        ({"num_kv_heads": 2}, "of another model: n_kv_heads is 2 (train.yaml has 4); make them equal."),
        (
            {"num_layers": 3, "rope_theta": 1e4},
            "num_layers is 3 (train.yaml has 4), theta is 10000.0 (train.yaml has 1000000.0)",
        ),
        ({"rope_theta": 1e4}, "theta is 10000.0 (train.yaml has 1000000.0)"),
        ({"family": "qwen3"}, "family is qwen3 (train.yaml has qwen2)"),
    ],
)
def test_train_and_infer_are_one_model(changes, words):
    message = refused(check, infer_model=ModelConfig(**{**MODEL.model_dump(), **changes}))
    assert message.startswith("infer.yaml: ")
    assert words in message


def test_token_ids_and_longest_lengths_may_differ():
    check(infer_model=ModelConfig(**{**MODEL.model_dump(), "eos_token_ids": (1, 2), "max_position_embeddings": 64}))


@pytest.mark.parametrize("advantage", COMPARING)
def test_one_response_per_prompt_leaves_nothing_to_compare(advantage):
    overrides = ["rollout.num_generations=1", f"algorithm.advantage={advantage}"]
    message = refused(check, overrides)
    assert message.startswith("rollout.num_generations is 1, and algorithm.advantage")
    assert repr(advantage) in message
    assert message.endswith("set it to 2 or more.")
    check(["rollout.num_generations=2", overrides[1]])


def test_greedy_responses_to_one_prompt_are_all_the_same():
    message = refused(check, ["rollout.temperature=0"])
    assert message.startswith("rollout.temperature is 0")
    assert "set it above 0" in message


def test_other_advantages_take_one_response_per_prompt():
    assert COMPARING
    for advantage in [name for name, method in ADVANTAGES.items() if not method.compares]:
        teacher = ["algorithm.teacher=some/model"] if ADVANTAGES.find(advantage).uses_teacher else []
        check(["rollout.num_generations=1", f"algorithm.advantage={advantage}", *teacher])


@pytest.mark.parametrize(
    ("prompts", "updates", "train_ranks", "infer_ranks", "start", "fix"),
    [
        (7, 1, 2, 2, "data.prompts_per_step is 7, which the data_parallel 2 of train.yaml does not divide", "6 or 8"),
        (3, 1, 4, 4, "data.prompts_per_step is 3, which the data_parallel 4 of train.yaml does not divide", "4"),
        (6, 1, 2, 4, "data.prompts_per_step is 6, which the data_parallel 4 of infer.yaml does not divide", "4 or 8"),
        (8, 3, 1, 1, "data.prompts_per_step is 8, which algorithm.updates_per_iteration 3 does not", "6 or 9"),
        (6, 2, 2, 2, "data.prompts_per_step is 6, which algorithm.updates_per_iteration 2 x data_parallel 2", "4 or 8"),
    ],
)
def test_a_steps_prompts_divide_over_ranks_and_updates(prompts, updates, train_ranks, infer_ranks, start, fix):
    def run(count):
        overrides = [f"data.prompts_per_step={count}", f"algorithm.updates_per_iteration={updates}"]
        workers = max(train_ranks, infer_ranks)
        check(
            overrides,
            train=yaml(data_parallel=train_ranks, model_parallel=workers // train_ranks),
            infer=yaml("infer.yaml", data_parallel=infer_ranks, model_parallel=workers // infer_ranks),
            workers=workers,
        )

    message = refused(run, prompts)
    assert message.startswith(start)
    assert f"set data.prompts_per_step to {fix}" in message
    for right in fix.split(" or "):
        run(int(right))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["rollout.min_new_tokens=9", "rollout.max_new_tokens=8"],
            "rollout.min_new_tokens is 9, above rollout.max_new_tokens 8; set it to 8 or less.",
        ),
        (["optimizer.min_lr=1e-3"], "optimizer.min_lr is 0.001, above optimizer.lr 1e-06; set it to 1e-06 or less."),
    ],
)
def test_settings_that_contradict_each_other(overrides, words):
    assert refused(check, overrides) == words


def test_the_longest_prompt_and_response_fit():
    config = load_grpo_config(None, ["rollout.max_new_tokens=100"])
    check_lengths(config, yaml(), MODEL, 412)
    message = refused(check_lengths, config, yaml(), MODEL, 413)
    assert "need 513 positions, and model.model_config.max_position_embedding is 512" in message
    assert "set rollout.max_new_tokens to 99 or fewer, or raise max_position_embedding to 513 or more" in message
    short = yaml(model={"seq_length": 200})
    check_lengths(config, short, MODEL, 100)
    message = refused(check_lengths, config, short, MODEL, 101)
    assert "model.model_config.seq_length is 200" in message
    assert "use shorter prompts" in refused(check_lengths, config, short, MODEL, 200)


def test_what_parallelism_here_cannot_do():
    message = refused(check, infer=yaml("infer.yaml", use_seq_parallel=True))
    assert message.startswith("infer.yaml: parallel_config.use_seq_parallel is True")


def test_rows_that_are_split_are_whole():
    """Padded lengths are multiples of the bucket, so the bucket decides."""
    layouts = {"train": yaml(model_parallel=4, use_seq_parallel=True), "infer": yaml("infer.yaml", model_parallel=4)}
    check(["train.length_bucket=8"], **layouts, workers=4)
    message = refused(check, ["train.length_bucket=6"], **layouts, workers=4)
    assert message.startswith("train.length_bucket is 6, which the model_parallel 4 of train.yaml, which has use_seq")
    assert message.endswith("set train.length_bucket to 4 or 8.")
    layouts["train"] = yaml(model_parallel=4)
    check(["train.length_bucket=6"], **layouts, workers=4)


def test_fine_tuning_is_checked_too():
    check_sft(SFTSettings(), yaml(data_parallel=2), MODEL, 2)
    assert "is 2, and the workers started are 1" in refused(check_sft, SFTSettings(), yaml(data_parallel=2), MODEL, 1)
    config = SFTSettings(data=SFTDataSettings(pairs_per_step=5))
    message = refused(check_sft, config, yaml(data_parallel=2), MODEL, 2)
    assert message.startswith("data.pairs_per_step is 5, which the data_parallel 2 of train.yaml does not divide")
    assert message.endswith("set data.pairs_per_step to 4 or 6.")


SYNC = ("algorithm.reference_sync_steps=5", "algorithm.reference_sync_share=0.5")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.advantage=grop"], "did you mean 'grpo'"),
        (["algorithm.aggregation=mean"], "token-mean"),
        (["algorithm.policy_loss=clipp"], "did you mean 'clip'"),
        (
            ["algorithm.advantage=rloo", "algorithm.gamma=0.9"],
            "algorithm.advantage 'rloo' has no such option (it belongs to reinforce_plus_plus and gae); remove it",
        ),
        (["algorithm.advantage=dr_grpo", "algorithm.leave_one_out=True"], "(it belongs to grpo); remove it"),
        (
            ["algorithm.advantage=grpo_passk", "algorithm.advantage_std=batch"],
            "Option advantage_std of advantage grpo_passk is 'batch': Input should be 'group' or 'none'",
        ),
        (["algorithm.normalize_functions=True", "algorithm.kl_in_reward=True"], "set kl_in_reward to False"),
        (
            ["algorithm.beta=0", "algorithm.kl_in_reward=True"],
            "beta 0 means that there is no reference model",
        ),
        (["algorithm.beta=0", "algorithm.kl_target=0.1"], "algorithm.kl_target is 0.1"),
        (["algorithm.advantage=distillation"], "algorithm.advantage distillation needs one; name an HF directory"),
        (["algorithm.teacher=some/model"], "algorithm.advantage grpo learns from none; set advantage to distillation"),
        (["algorithm.beta=0", "algorithm.reference_sync_steps=5"], "or remove reference_sync_steps"),
        (["lora.alpha=16"], "lora.alpha is 16.0, and lora.rank 0 means that there are no adapters; set lora.rank"),
        (["lora.dropout=0.1"], "lora.dropout is 0.1, and lora.rank 0 means that there are no adapters; set lora.rank"),
        (["lora.rank=4", "algorithm.reference_sync_steps=5"], "set lora.reference to start and reference_sync_share"),
        (
            ["lora.rank=4", "lora.reference=start", *SYNC],
            "with algorithm.reference_sync_share 0.5 and lora.reference start",
        ),
        (["rollout_correction.lower=3"], "above rollout_correction.upper 2; set it to 2 or less"),
        (
            ["algorithm.policy_loss=clip_cov", "algorithm.clip_cov_lb=5", "algorithm.clip_cov_ub=1"],
            "not below algorithm.clip_cov_ub 1",
        ),
        (["reward.overlong_buffer=300"], "above rollout.max_new_tokens 256; set it to 256 or less"),
        (["dynamic_sampling.enabled=True", "dynamic_sampling.metric=acc"], "give one of gsm8k."),
        (
            ["dynamic_sampling.enabled=True", "dynamic_sampling.prompts_per_round=2", "dynamic_sampling.max_rounds=3"],
            "3 rounds of 2 prompts are fewer than data.prompts_per_step 8; set max_rounds to 4 or more",
        ),
        (
            ["dynamic_sampling.enabled=True", "rollout.num_generations=1", "algorithm.advantage=remax"],
            "set it to 2 or more",
        ),
    ],
)
def test_the_algorithms_settings_must_fit_together(overrides, words):
    assert words in refused(check, overrides)


def test_rounds_divide_over_the_ranks_that_generate():
    layout = {"train": yaml(data_parallel=2), "infer": yaml("infer.yaml", data_parallel=2), "workers": 2}
    rounds = ["dynamic_sampling.enabled=True", "dynamic_sampling.prompts_per_round=5"]
    assert (
        "data_parallel 2 of infer.yaml does not divide; set dynamic_sampling.prompts_per_round to 4 or 6."
        in refused(check, rounds, **layout)
    )
    check(["dynamic_sampling.enabled=True", "dynamic_sampling.prompts_per_round=6"], **layout)


def test_options_of_a_method_pass():
    check(["algorithm.advantage=gae", "algorithm.gamma=0.9", "algorithm.lam=0.8", "rollout.num_generations=1"])
    check(["algorithm.leave_one_out=True", "algorithm.advantage_std=batch", "algorithm.normalize_functions=True"])
    check(["algorithm.kl_in_reward=True", "algorithm.kl_target=0.1", "algorithm.reference_sync_steps=5"])


def test_what_is_measured_and_resumed_from_is_given():
    check(["data.val_dataset=a", "trainer.test_freq=2", "trainer.save_best_metric=val-core/gsm8k/acc/mean@1"])
    check(["trainer.resume_mode=resume_path", "trainer.resume_from_path=a"])
    assert "trainer.val_only needs held-out problems; set data.val_dataset" in refused(check, ["trainer.val_only=True"])
    assert "trainer.test_freq needs" in refused(check, ["trainer.test_freq=2"])
    message = refused(check, ["data.val_dataset=a", "trainer.save_best_metric=val-core/gsm8k/acc/mean@1"])
    assert message.endswith("which is measured every trainer.test_freq steps; set test_freq too.")
    for setting in ("early_stop_patience=2", "export_best=True"):
        check([f"trainer.{setting}", "trainer.save_best_metric=critic/rewards/mean"])
        assert "follows trainer.save_best_metric, which is null" in refused(check, [f"trainer.{setting}"])
    for given in (["trainer.resume_mode=resume_path"], ["trainer.resume_mode=auto", "trainer.resume_from_path=a"]):
        assert "a path goes with resume_path, or give --resume_training PATH" in refused(check, given)


def test_validation_takes_the_rest_from_rollout():
    config = load_grpo_config(
        overrides=["rollout.max_new_tokens=7", "rollout.stop_strings=[x]", "validation.top_p=0.5"]
    )
    sampling = config.validation.completed(config.rollout)
    assert (sampling.max_new_tokens, sampling.stop_strings, sampling.top_p, sampling.temperature) == (7, ("x",), 0.5, 0)
    own = load_grpo_config(overrides=["validation.max_new_tokens=9", "validation.stop_strings=[]"])
    sampling = own.validation.completed(own.rollout)
    assert (sampling.max_new_tokens, sampling.stop_strings) == (9, ())
