"""On-policy distillation: the policy moves towards a teacher of another size, by what it draws itself."""

import json

import jobs
import numpy as np
import pytest
import reference_model
from small_model import log_softmax, random_arrays, read_model, small_config

from mindrlhf.checkpoint.hf import read_hf_config, save_hf
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.data.tokenizer import Tokenizer, train_tokenizer
from mindrlhf.flags import TrainFlags
from mindrlhf.model_roles import RoleModel
from mindrlhf.models.parameters import EMBEDDING, parameter_table
from mindrlhf.trainer.check import read_roles

SETTINGS = (
    "algorithm.advantage=distillation",
    "algorithm.beta=0",
    "algorithm.aggregation=token-mean",
    "optimizer.lr=1e-2",
    "rollout.num_generations=8",
    "rollout.temperature=0.8",
    "train.length_bucket=48",
    "trainer.total_steps=20",
)


def save_teacher(folder, tokenizer: Tokenizer):
    """Write a random model of other sizes than the policy's, which prefers some tokens wherever they stand."""
    shape = {"num_layers": 1, "hidden_size": 48, "num_heads": 6, "num_kv_heads": 3, "head_dim": 8}
    config = small_config(vocab_size=320, max_position_embeddings=2048, **shape)
    arrays = random_arrays(config, seed=1)
    arrays[EMBEDDING] += np.float32(3)  # the final state has a direction that all positions share
    save_hf(folder, config, ((spec, arrays[spec.name]) for spec in parameter_table(config)), tokenizer=tokenizer)
    return folder


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A run, with its teacher's folder."""
    folder = tmp_path_factory.mktemp("distillation")
    task = jobs.make_task(folder, layers=1)
    teacher = save_teacher(folder / "teacher", Tokenizer.from_path(folder))
    assert jobs.call(task.train(folder / "run", *SETTINGS, f"algorithm.teacher={teacher}")) == 0
    return jobs.Run(folder / "run"), teacher, task


def test_the_policy_moves_towards_the_teacher(taught):
    divergence = taught[0].column("distillation/reverse_kl")
    assert divergence[0] > 1
    assert divergence[-5:].mean() < 0.4 * divergence[:5].mean()


def test_advantages_are_log_ratios_of_float64(taught):
    run, teacher, _ = taught
    config, tensors = read_model(teacher)
    expected = []
    for experience in run.rollouts[0][1]:
        prompt = experience.group.prompt.token_ids
        for rollout in experience.group.rollouts:
            ids = np.array([*prompt, *rollout.response_ids])
            theirs = log_softmax(reference_model.logits(config, tensors, ids[:-1]) / 0.8)
            drawn = theirs[np.arange(len(prompt) - 1, len(ids) - 1), rollout.response_ids]
            expected += [*(drawn - rollout.row("policy_log_probs"))]
    assert run.column("distillation/reverse_kl")[0] == pytest.approx(-np.mean(expected), abs=1e-4)
    for name, of in {"mean": np.mean, "max": np.max, "min": np.min}.items():
        assert run.column(f"critic/advantages/{name}")[0] == pytest.approx(of(expected), abs=2e-4)


def test_its_time_and_memory_are_its_own(taught):
    run, teacher, _ = taught
    _, tensors = read_model(teacher)
    assert (run.column("timing_s/teacher") > 0).all()
    held = sum(array.size for array in tensors.values()) * 4 / 2**30
    assert run.column("swap/role_gb/teacher")[-1] == pytest.approx(held, rel=1e-6)


def test_a_teacher_with_an_adapter_is_not_its_base_alone(taught, tmp_path):
    _, teacher, _ = taught
    described = {"peft_type": "LORA", "base_model_name_or_path": str(teacher), "r": 2}
    described |= {"lora_alpha": 4, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    settings = load_grpo_config(None, ["algorithm.advantage=distillation", f"algorithm.teacher={tmp_path}"])
    model = read_hf_config(teacher)
    assert read_roles(TrainFlags(), settings, model)["teacher"] == RoleModel(str(tmp_path), model)


def test_a_teacher_of_other_tokens_is_refused(taught, tmp_path, capsys):
    _, _, task = taught
    other = save_teacher(tmp_path / "other", train_tokenizer(["zebra crossing", "xylophone"], 300))
    assert jobs.call(task.train(tmp_path / "run", *SETTINGS, f"algorithm.teacher={other}")) == 2
    message = capsys.readouterr().err
    assert f"algorithm.teacher: {other}: token " in message
    assert message.strip().endswith("give a teacher with the policy's tokenizer.")
    assert jobs.call(task.train(tmp_path / "run", *SETTINGS, f"algorithm.teacher={task.folder}/train.yaml")) == 2
