"""Words of a verl command line: Hydra's forms of keys and values, and YAML files of keys."""

import pytest

from mindrlhf.errors import UserError
from mindrlhf.migration.verl.command import read_command
from mindrlhf.migration.verl.translation import translate


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("x=1", 1),
        ("+x=-1", -1),
        ("++x=1e-6", 1e-6),
        ("x=.5", 0.5),
        ("x=True", True),
        ("x=false", False),
        ("x=NULL", None),
        ("x=", ""),
        ("x=off", "off"),
        ("x=12:30:00", "12:30:00"),
        ("x=2024-01-01", "2024-01-01"),
        ("x=\"'1'\"", "1"),
        ("x='\"two words\"'", "two words"),
        ('x=\'["a","b"]\'', ["a", "b"]),
        ("x=\"['a', 'b']\"", ["a", "b"]),
        ("x=['a','b']", ["a", "b"]),
        ("x='[1, 2.5]'", [1, 2.5]),
    ],
)
def test_values_as_hydra_reads_them(word, value):
    found = read_command(word).given["x"]
    assert found == value
    assert type(found) is type(value)


def test_words_that_are_no_keys():
    command = read_command(
        "CUDA_VISIBLE_DEVICES=0 python3 -m verl.trainer.main_ppo --config-path=config "
        "--config-name ppo_megatron_trainer.yaml \\\n actor_rollout_ref.rollout.n=5  # samples\n"
    )
    assert command.given == {"rollout.n": 5}


def test_later_keys_and_keys_taken_back():
    assert read_command("a.b=1 +a.b=2 a.c=3 ~a.c a.d=4 ~a.d=4").given == {"a.b": 2}


def test_references_to_other_keys():
    given = read_command("trainer.project_name=p trainer.experiment_name='${trainer.project_name}_1'").given
    assert given["trainer.experiment_name"] == "p_1"
    assert read_command("x='${rollout.n}'").given == {"x": 1}, "verl's default"


def test_a_configuration_of_ones_own_is_not_passed_over():
    with pytest.raises(UserError, match="--config-name mine names a configuration that is not verl's own"):
        read_command("--config-name mine data.train_batch_size=8")


def test_a_file_lies_beneath_the_keys(tmp_path):
    """Defaults, null and what follows from other keys ask for nothing."""
    path = tmp_path / "config.yaml"
    path.write_text(
        "actor_rollout_ref:\n"
        "  model: {path: models/m, lora_rank: 0, lora_alpha: 64, exclude_modules: x, use_liger: null,\n"
        "          enable_gradient_checkpointing: true}\n"
        "  rollout: {n: 5, name: '???', multi_turn: {enable: false}, prompt_length: '${data.max_prompt_length}'}\n"
        "data: {image_key: images, train_files: null, train_batch_size: 16}\n"
        "reward_model: {enable: false}\n"
        "algorithm: {adv_estimator: grpo, _target_: x}\n"
        "trainer: {mine: 3, save_freq: 10}\n"
    )
    command = read_command(f"{path} data.train_batch_size=32")
    assert command.given == {
        "model.path": "models/m",
        "model.lora_alpha": 64,
        "model.exclude_modules": "x",
        "rollout.n": 5,
        "rollout.multi_turn.enable": False,
        "data.train_batch_size": 32,
        "reward_model.enable": False,
        "algorithm.adv_estimator": "grpo",
        "trainer.mine": 3,
        "trainer.save_freq": 10,
    }
    assert "data.train_batch_size" not in command.from_files
    translation = translate(f"{path} data.train_batch_size=32")
    assert "trainer.save_freq=10" in translation.overrides
    assert translation.unknown.keys() == {"trainer.mine"}, "a file may come from another version: told, not refused"
    assert "from verl, unknown:\n  trainer.mine is no key of verl's" in str(translation)
    assert "no adapters of the policy are asked for: 2 keys of the file" in str(translation)


def test_a_file_that_asks_for_what_is_not_done(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("actor_rollout_ref: {rollout: {ignore_eos: True}}\n")
    with pytest.raises(UserError, match=r"not done here: rollout.ignore_eos=True \(answers that go on"):
        translate(str(path)).check()
