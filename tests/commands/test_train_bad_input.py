"""Everything that can be wrong with what `mindrlhf train` is given: one sentence, exit code 2, nothing touched."""

import shutil

import jobs
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindrlhf.data.mindrecord import PROMPT_SCHEMA, write_columns


def both(setting: str) -> tuple[str, str]:
    """A setting for both model YAMLs."""
    return f"train_yaml.{setting}", f"infer_yaml.{setting}"


# --- the dataset ---


def test_missing_dataset(task, output, refused):
    path = output.parent / "none.mindrecord"
    refused(task.train(output, mind_dataset_dir=path), f"{path}: no such MindRecord file")
    refused(task.train(output, mind_dataset_dir=None), "--mind_dataset_dir is missing", "rlhf_data.py")


def test_empty_dataset(task, output, refused):
    from mindspore.mindrecord import FileWriter

    path = output.parent / "empty.mindrecord"
    path.write_bytes(b"")
    refused(task.train(output, mind_dataset_dir=path), f"{path}: is not a MindRecord file", "mindrlhf data")
    path.unlink()
    writer = FileWriter(str(path), shard_num=1)
    writer.add_schema(PROMPT_SCHEMA, "prompts")
    writer.add_index(["row_index"])
    writer.commit()
    refused(task.train(output, mind_dataset_dir=path), f"{path}: holds no rows")


def test_wrong_columns(task, output, refused):
    path = output.parent / "other.mindrecord"
    write_columns(path, {"text": {"type": "string"}, "label": {"type": "int64"}}, [{"text": "a", "label": 1}])
    refused(task.train(output, mind_dataset_dir=path), f"{path}: has no column", "prompt_ids", "it has", "label")


def test_no_mindrecord(task, output, refused):
    path = task.folder / "train.yaml"
    refused(task.train(output, mind_dataset_dir=path), f"{path}: is not a MindRecord file", "mindrlhf data")


def test_rows_that_are_no_problems(task, output, refused):
    path = output / "rows.jsonl"
    output.mkdir(parents=True, exist_ok=True)
    path.write_text('{"question": 1}\n')
    refused(task.train(output, mind_dataset_dir=path), f"{path}, line 1: not a fields row", "question")
    path.write_text('{"question": "1?"}\n')  # a problem without an answer, which not all rewards need
    refused([*task.train(output, mind_dataset_dir=path), "reward.functions=gsm8k"], "ground")


def test_a_prompt_dataset_is_no_replay(task, output, refused):
    path = task.folder / "train.mindrecord"
    refused(task.train(output, replay=path), f"{path}: has no column", "response_ids")


# --- the tokenizer ---


def test_tokenizer_larger_than_the_vocabulary(task, output, refused):
    argv = task.train(output, *both("model.model_config.vocab_size=290"))
    refused(argv, "the tokenizer has 300 tokens", "vocab_size is 290", "vocab.json and merges.txt of this model")


def test_dataset_of_another_tokenizer(task, output, refused, tmp_path):
    smaller = jobs.make_task(tmp_path / "smaller", vocab_size=290, layers=1)
    argv = smaller.train(output, mind_dataset_dir=task.folder / "train.mindrecord")
    refused(argv, task.folder / "train.mindrecord", "is beyond the tokenizer's 290 tokens", "convert the data")


def test_merges_of_another_vocabulary(task, output, refused, tmp_path):
    (tmp_path / "merges.txt").write_text("#version: 0.2\nZZ QQ\n")
    argv = task.train(output, merges_file_path=tmp_path / "merges.txt")
    refused(argv, task.folder / "vocab.json", tmp_path / "merges.txt", "ZZ")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"merges_file_path": None}, "--vocab_path and --merges_file_path belong together"),
        ({"vocab_path": None, "merges_file_path": None}, "no tokenizer is given; use --vocab_path"),
        ({"vocab_path": "none.json"}, "none.json"),
    ],
)
def test_no_tokenizer(task, output, refused, flags, text):
    refused(task.train(output, **flags), text)


# --- the weights ---


@pytest.fixture
def weights(model, tmp_path):
    """A copy of the model to spoil: its folder, and its tensors."""
    folder = shutil.copytree(model, tmp_path / "spoilt")
    return folder, load_file(folder / "model.safetensors")


def test_missing_checkpoint(task, output, refused):
    for flag in ("load_sft_checkpoint_infer", "load_sft_checkpoint_train", "load_ref_checkpoint"):  # beta is above 0
        refused(task.train(output, **{flag: "none"}), "none: no such checkpoint", "HF directory")


def test_missing_weight(task, output, refused, weights):
    folder, tensors = weights
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    refused(task.train(output, load_sft_checkpoint_infer=folder), folder, "model.layers.0.mlp.up_proj.weight")


def test_weight_of_another_shape(task, output, refused, weights):
    folder, tensors = weights
    tensors["model.norm.weight"] = np.ones(31, np.float32)
    save_file(tensors, folder / "model.safetensors")
    argv = task.train(output, load_sft_checkpoint_infer=folder)
    refused(argv, folder / "model.safetensors", "model.norm.weight has shape [31]", "[32]")


def test_truncated_weights(task, output, refused, weights):
    file = weights[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refused(task.train(output, load_sft_checkpoint_infer=weights[0]), f"{file}: the file is truncated", "get it again")


def test_reference_of_another_shape(task, output, refused, weights):
    """It is read last, when policy and dataset are already there."""
    folder, tensors = weights
    tensors["model.norm.weight"] = np.ones(31, np.float32)
    save_file(tensors, folder / "model.safetensors")
    argv = task.train(output, "algorithm.beta=0.1", load_ref_checkpoint=folder)
    refused(argv, folder / "model.safetensors", "model.norm.weight has shape [31]")


def test_reference_of_another_architecture(task, output, refused, weights):
    """The same shapes, and yet another model."""
    config = weights[0] / "config.json"
    config.write_text(config.read_text().replace("1000000.0", "10000.0"))
    argv = task.train(output, load_ref_checkpoint=weights[0])
    refused(argv, weights[0], "rope_theta is 10000.0 (the model that is trained has 1000000.0)")


def test_checkpoint_of_another_model(task, output, refused, model):
    argv = task.train(output, *both("model.model_config.intermediate_size=96"), load_sft_checkpoint_infer=model)
    refused(argv, model, "intermediate_size is 96 (the checkpoint has 64)")


# --- the settings ---


@pytest.mark.parametrize(
    ("setting", "texts"),
    [
        ("model.model_config.hidden_sizes=32", ("unknown key model.model_config.hidden_sizes", "hidden_size")),
        ("parallel_config.data_paralel=1", ("unknown key parallel_config.data_paralel", "data_parallel")),
        ("context.device_targt=CPU", ("unknown key context.device_targt", "device_target")),
        ("model.model_config.num_layers=two", ("model.model_config.num_layers", "two")),
        ("parallel_config.data_parallel=[1]", ("parallel_config.data_parallel", "[1]")),
        ("model.model_config.num_heads=5", ("hidden_size 32 is not a multiple of num_heads 5", "give head_dim")),
        ("model.model_config.n_kv_heads=3", ("num_heads", "4", "3")),
        (
            "model.model_config.compute_dtype=float16",
            ("compute_dtype", "float16", "float32 or bfloat16"),
        ),
        ("parallel_config.model_parallel=2", ("is 2, and the workers started are 1", "msrun --worker_num=2")),
        ("context.device_target=GPU", ("context.device_target", "GPU", "CPU")),
    ],
)
def test_model_yaml(task, output, refused, setting, texts):
    refused(task.train(output, f"train_yaml.{setting}"), *texts)


def test_model_yaml_names_the_line(task, output, refused):
    yaml = output.parent / "train.yaml"
    yaml.write_text(f"base_config: {task.folder}/train.yaml\ncontext:\n  device_targt: CPU\n")
    refused(task.train(output, sft_path_train=yaml), f"{yaml}:3: unknown key context.device_targt")


@pytest.mark.parametrize(
    ("setting", "texts"),
    [
        ("rollout.num_generations=1", ("rollout.num_generations is 1", "set it to 2 or more")),
        ("rollout.num_generation=4", ("unknown key rollout.num_generation", "num_generations")),
        ("rolout.num_generations=4", ("unknown key rolout", "rollout")),
        ("rollout.temperature=0", ("rollout.temperature is 0", "above 0")),
        ("data.prompts_per_step=four", ("data.prompts_per_step", "four")),
        ("algorithm.updates_per_iteration=3", ("data.prompts_per_step is 4", "3 or 6")),
        ("algorithm.policy_loss=clipp", ("clipp", "clip")),
        ("algorithm.advantage=grop", ("grop", "grpo")),
        ("algorithm.lam=0.9", ("algorithm.lam is 0.9", "'grpo' has no such option", "gae")),
        ("algorithm.tau_positive=2", ("algorithm.tau_positive is 2.0", "algorithm.policy_loss 'clip'", "remove it")),
        ("algorithm.kl_estimator=k4", ("k4", "k3")),
        ("algorithm.aggregation=mean", ("mean", "token-mean")),
        ("optimizer.min_lr=1", ("optimizer.min_lr is 1, above optimizer.lr",)),
        ("reward.functions=[{name: gsm8]", ("reward.functions",)),
        ("reward.functions=[{name: gsm}]", ("gsm", "gsm8k")),
        ("reward.functions=[{name: 'none.py:f'}]", ("none.py",)),
        ("rollout.max_new_tokens=4000", ("rollout.max_new_tokens 4000", "is 2048", "set rollout.max_new_tokens to")),
        ("seed=-1", ("seed", "-1")),
        ("seed", ("seed", "key=value")),
    ],
)
def test_grpo_settings(task, output, refused, setting, texts):
    refused(task.train(output, setting), *texts)


def test_grpo_config_names_file_and_line(task, output, refused):
    config = output.parent / "grpo.yaml"
    config.write_text("rollout:\n  num_generation: 4\n")
    refused(task.train(output, grpo_config=config), f"{config}:2: unknown key rollout.num_generation")
    refused(task.train(output, grpo_config=output.parent / "none.yaml"), "none.yaml: there is no such file")


def test_fewer_rows_than_a_step(task, output, refused):
    argv = task.train(output, "data.prompts_per_step=100", "trainer.total_steps=null")
    refused(argv, "data.prompts_per_step is 100", "64 rows", "set it to 64 or fewer")


def test_parallel_product_and_started_workers(task, output, refused, monkeypatch):
    argv = task.train(output, *both("parallel_config.data_parallel=3"))
    refused(argv, "is 3, and the workers started are 1", "msrun --worker_num=3")
    refused(task.train(output, use_parallel="True"), "--use_parallel is True", "start it with msrun")
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    refused(task.train(output), "is 1, and the workers started are 2")
    argv = task.train(output, *both("parallel_config.data_parallel=2"), use_parallel="False")
    refused(argv, "--use_parallel is False, and msrun started 2 workers", "set it to True")
    argv = task.train(
        output, *both("parallel_config.model_parallel=2"), "infer_yaml.parallel_config.use_seq_parallel=True"
    )
    refused(argv, "use_seq_parallel is True", "set it to False")


# --- the outputs ---


def test_outputs_that_cannot_be_written(task, output, refused):
    below = output / "metrics.jsonl" / "below"  # a regular file: nobody can write below it, not even root
    for flags in ({"save_ckpt_dir": below}, {"output_dir": below}, {"save_data_file": below / "rollouts.mindrecord"}):
        refused(
            task.train(output, **flags), "cannot create the folder", output / "metrics.jsonl", "that can be written"
        )


def test_outputs_in_the_place_of_something_else(task, output, refused):
    refused(task.train(output, save_data_file=output / "ckpt"), f"{output / 'ckpt'}: is a folder")
    (output / "ckpt" / "hf" / "thesis.tex").write_text("somebody's")
    refused(task.train(output), "thesis.tex: is no part of a model")


@pytest.mark.parametrize(
    ("flag", "value", "text"),
    [
        ("use_parallel", "maybe", "'maybe' is neither True nor False"),
        ("pre_store_data", "many", "invalid int value"),
    ],
)
def test_flags(task, output, capsys, flag, value, text):
    """argparse's own errors: exit code 2 as well, with the usage before the sentence."""
    with pytest.raises(SystemExit) as stopped:
        jobs.call(task.train(output, **{flag: value}))
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


def test_unknown_flags(task, output, refused):
    refused(task.train(output, mind_dataset_dr="x"), "unknown flag --mind_dataset_dr; did you mean --mind_dataset_dir?")
    refused(task.train(output, temperature="1"), "unknown key temperature; did you mean rollout.temperature?")
