"""`GRPOConfig` and `SFTConfig`: keys of TRL, ours and flags, read back as attributes, refused where they are wrong."""

import subprocess
import sys

import pytest

from mindrlhf import GRPOConfig, SFTConfig, UserError
from mindrlhf.migration.trl.translation import RunSizes


def test_keys_of_all_kinds():
    config = GRPOConfig(
        "out", learning_rate=3e-6, rollout={"max_slots": 8}, tensor_parallel=2, **{"optimizer.beta1": 0.8}
    )
    settings = config.settings()
    assert (settings.optimizer.lr, settings.optimizer.beta1, settings.rollout.max_slots) == (3e-6, 0.8, 8)
    assert settings.optimizer.beta2 == 0.999  # TRL's default
    resolved = config.resolve(RunSizes(devices=4, rows=100))
    assert resolved.flags["tensor_parallel"] == 2
    assert resolved.settings.values["data"]["prompts_per_step"] == 4  # 8 completions x 4 devices / 8 generations


def test_model_yaml_keys_are_overrides():
    config = GRPOConfig(train_yaml={"recompute_config": {"recompute": True}}, **{"infer_yaml.context.jit_level": "O1"})
    assert config.resolve(RunSizes()).flags["overrides"] == [
        "train_yaml.recompute_config.recompute=true",
        'infer_yaml.context.jit_level="O1"',
    ]


def test_keys_are_attributes():
    config = GRPOConfig("out", learning_rate=3e-6, bf16=True)
    assert (config.output_dir, config.learning_rate, config.bf16) == ("out", 3e-6, True)
    assert (config.max_completion_length, config.beta, config.per_device_train_batch_size) == (256, 0.0, 8)
    assert config.top_entropy_quantile == 1.0
    assert config.use_vllm is None
    config.num_generations = 4
    assert config.settings().rollout.num_generations == 4
    with pytest.raises(UserError, match="num_generations"):
        config.num_generations = 0
    assert config.num_generations == 4
    with pytest.raises(AttributeError, match="learning_rat"):
        _ = config.learning_rat
    assert "learning_rate=3e-06" in repr(config)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"learning_rat": 1e-6}, "GRPOConfig: unknown key learning_rat; did you mean learning_rate"),
        ({"learning_rate": "fast"}, "GRPOConfig: learning_rate"),
        ({"learning_rate": 1e-6, "optimizer": {"lr": 1e-6}}, "optimizer.lr is the same setting"),
        ({"top_entropy_quantile": 0.2}, "set it to 1.0"),
        ({"rollout": {"max_slot": 8}}, "max_slots"),
    ],
)
def test_refused(keys, message):
    with pytest.raises(UserError, match=message):
        GRPOConfig(**keys)


def test_fine_tuning():
    config = SFTConfig("out", per_device_train_batch_size=4, gradient_accumulation_steps=2, packing=True)
    resolved = config.resolve(RunSizes(devices=2, rows=100))
    assert resolved.settings.values["data"] == {"max_length": 1024, "pairs_per_step": 16}
    assert list(resolved.needless) == ["packing"]
    settings = config.settings()
    assert (settings.optimizer.lr, settings.trainer.epochs, config.max_length) == (2e-5, 3, 1024)
    best = SFTConfig(load_best_model_at_end=True, metric_for_best_model="eval_loss", train={"length_bucket": 8})
    trainer = best.settings().trainer
    assert (trainer.export_best, *trainer.best) == (True, "val/loss", "min")
    with pytest.raises(UserError, match="validation has other names here"):
        GRPOConfig(metric_for_best_model="eval_loss")
    best = GRPOConfig(metric_for_best_model="eval_reward", eval_strategy="steps", eval_steps=5)
    assert best.settings().trainer.save_best_metric == "val/reward"
    assert SFTConfig(**{"data.pairs_per_step": 5}).settings().data.pairs_per_step == 5
    with pytest.raises(UserError, match="loss_type is 'dft'"):
        SFTConfig(loss_type="dft")
    with pytest.raises(UserError, match=r"data\.pairs_per_step is given"):
        SFTConfig(per_device_train_batch_size=4, data={"pairs_per_step": 5})


def test_importing_the_package_is_cheap():
    """Neither NumPy nor MindSpore, before a name of the API is used; MindSpore not before a run."""
    program = (
        "import sys; import mindrlhf; assert 'numpy' not in sys.modules and 'pydantic' not in sys.modules;"
        "from mindrlhf import GRPOConfig, GRPOTrainer, SFTTrainer; GRPOConfig('out', max_steps=2);"
        "assert 'mindspore' not in sys.modules; assert {'GRPOTrainer', 'SFTTrainer'} <= set(dir(mindrlhf))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
