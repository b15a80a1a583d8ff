"""Checkpoints of verl: each folder of one is answered by verl's merge command."""

import pytest

from mindrlhf.checkpoint.resume import locate
from mindrlhf.checkpoint.verl_shards import refuse_verl_shards
from mindrlhf.checkpoint.weight_source import index_weights
from mindrlhf.checkpoint.weights import checkpoint_config
from mindrlhf.cli import main
from mindrlhf.errors import UserError


@pytest.fixture
def run(tmp_path):
    """A run of verl with two checkpoints of four FSDP ranks."""
    for step in (9, 10):
        actor = tmp_path / f"global_step_{step}" / "actor"
        (actor / "huggingface").mkdir(parents=True)
        (actor / "huggingface" / "config.json").write_text("{}")
        for rank in range(4):
            (actor / f"model_world_size_4_rank_{rank}.pt").write_bytes(b"PK")
    return tmp_path


@pytest.mark.parametrize("read", [checkpoint_config, index_weights, locate, refuse_verl_shards])
@pytest.mark.parametrize(
    "place", ["", "global_step_10", "global_step_10/actor", "global_step_10/actor/huggingface", "shard"]
)
def test_every_folder_of_a_run_names_the_merge(run, place, read):
    actor = run / "global_step_10" / "actor"
    path = actor / "model_world_size_4_rank_1.pt" if place == "shard" else run / place
    with pytest.raises(UserError) as refused:
        read(path)
    command = f"python -m verl.model_merger merge --backend fsdp --local_dir {actor} --target_dir {actor}/merged"
    assert f"`{command}`" in str(refused.value)
    assert str(refused.value).endswith(f"and give {actor}/merged.")


def test_megatrons_and_whole_weights(tmp_path):
    actor = tmp_path / "global_step_1" / "actor"
    (actor / "dist_ckpt").mkdir(parents=True)
    with pytest.raises(UserError, match="merge --backend megatron --local_dir"):
        refuse_verl_shards(tmp_path / "global_step_1")
    (actor / "huggingface").mkdir()
    (actor / "huggingface" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=f"give {actor}/huggingface, which has the whole weights"):
        refuse_verl_shards(tmp_path / "global_step_1")
    refuse_verl_shards(actor / "huggingface")


def test_other_folders_pass(tmp_path):
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "global_step_x").mkdir()
    refuse_verl_shards(tmp_path)
    refuse_verl_shards(tmp_path / "huggingface")
    refuse_verl_shards(tmp_path / "absent")


def test_a_command_says_it(run, capsys):
    assert main(["plan", "--load_sft_checkpoint_infer", str(run / "global_step_9"), "--device", "CPU"]) == 2
    assert "verl.model_merger merge --backend fsdp" in capsys.readouterr().err
