"""Runs with adapters, end to end: what they save and leave, where they begin, and that they go on bit for bit."""

import json
import random
import re
import shutil
from dataclasses import replace

import jobs
import numpy as np
import phases
import pytest
from safetensors.numpy import load_file
from slow_cases import few_of
from small_model import random_arrays
from workers import run_ranks

from mindrlhf.checkpoint.hf import read_hf_config, save_hf
from mindrlhf.checkpoint.peft import read_adapter
from mindrlhf.checkpoint.weight_source import index_weights
from mindrlhf.checkpoint.weights import Weights
from mindrlhf.configs.model_yaml import load_model_yaml
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.models.parameters import parameter_table

STEPS = 4
SETTINGS = (
    *("lora.rank=4", "lora.alpha=8", "optimizer.lr=1e-2", "algorithm.beta=0", "algorithm.updates_per_iteration=2"),
    *(f"trainer.total_steps={STEPS}", "trainer.save_freq=1", "trainer.loggers=[console, jsonl]"),
    *("trainer.progress=False", "rollout.max_new_tokens=8", "data.prompts_per_step=8", "train.length_bucket=48"),
)
MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def base(task, tmp_path_factory):
    """An HF directory with random weights, which the runs begin with."""
    return write_base(tmp_path_factory.mktemp("base") / "hf", task, 0)


def write_base(folder, task, seed, layers=1):
    config = load_model_yaml(task.folder / "train.yaml").architecture().model_copy(update={"num_layers": layers})
    arrays = random_arrays(config, seed)
    tensors = ((spec, arrays[spec.name]) for spec in parameter_table(config))
    save_hf(folder, config, tensors, tokenizer=Tokenizer.from_path(task.folder))
    return folder


def arguments_of(task, base, layers):
    def make(folder, *settings, **flags):
        return task.train(folder, *SETTINGS, *layers, *settings, **{"load_sft_checkpoint_infer": base} | flags)

    return make


@pytest.fixture(scope="module")
def argv(task, base):
    return arguments_of(task, base, jobs.ONE_LAYER)


@pytest.fixture(scope="module")
def whole(argv, tmp_path_factory):
    """A run that was never stopped."""
    return never_stopped(argv, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def two_layers(task, tmp_path_factory):
    """As `argv` and `whole`, of a model that pipeline stages can share."""
    folder = tmp_path_factory.mktemp("two_layers")
    argv = arguments_of(task, write_base(folder / "hf", task, 0, layers=2), jobs.TWO_LAYERS)
    return argv, never_stopped(argv, folder)


def never_stopped(argv, folder):
    output = phases.to_the_end(argv(folder / "run"), folder / "phases")
    assert "continue" not in output
    return folder / "run"


def test_the_adapter_on_its_base_is_the_merged_model(whole, base):
    config, adapter = read_hf_config(base), whole / "ckpt" / "hf_adapter"
    assert read_adapter(adapter).base.name == str(base.resolve())
    merged, first = (load_file(at / "model.safetensors") for at in (whole / "ckpt" / "hf", base))
    read, changed = Weights(str(adapter), config, 0).reader(), 0
    for spec in parameter_table(config):
        np.testing.assert_allclose(read(spec), merged[spec.hf_name], rtol=1e-6, atol=1e-7)
        changed += not np.array_equal(first[spec.hf_name], merged[spec.hf_name])
    assert changed == 7 * config.num_layers
    assert "library_name: peft" in (adapter / "README.md").read_text()
    assert "library_name: transformers" in (whole / "ckpt" / "hf" / "README.md").read_text()


def test_checkpoints_hold_the_adapters_and_their_moments_alone(whole, base):
    stored = read_adapter(whole / "ckpt" / "hf_adapter")
    size = sum(array.size for array in stored.arrays.values())
    for kind in ("model", *MOMENTS):
        tensors = index_weights(whole / "ckpt" / f"step_{STEPS:06d}" / "rank_0" / f"{kind}.safetensors")
        assert sum(int(np.prod(tensor.shape)) for tensor in tensors.values()) == size
        assert all(name.endswith((".lora_a", ".lora_b")) for name in tensors)
    state = json.loads((whole / "ckpt" / "latest").with_name(f"step_{STEPS:06d}").joinpath("state.json").read_text())
    assert state["run"]["base"]["path"] == str(base.resolve())
    assert state["run"]["base"]["fingerprint"] == stored.base.fingerprint


def test_export_gives_the_adapter_or_the_merged_model(whole, tmp_path, capsys):
    command = ["export", "--checkpoint", whole / "ckpt" / "latest", "--output"]
    assert jobs.call([*command, tmp_path / "adapter"]) == 0
    assert jobs.call([*command, tmp_path / "merged", "--merge"]) == 0
    ours, theirs = (read_adapter(at) for at in (tmp_path / "adapter", whole / "ckpt" / "hf_adapter"))
    assert (ours.adapter, ours.base) == (theirs.adapter, theirs.base)
    assert all(np.array_equal(ours.arrays[name], theirs.arrays[name]) for name in theirs.arrays)
    exported, left = (load_file(at / "model.safetensors") for at in (tmp_path / "merged", whole / "ckpt" / "hf"))
    assert exported.keys() == left.keys()
    for name in left:
        np.testing.assert_allclose(exported[name], left[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("source", ["latest", "hf_adapter"])
def test_transform_merges_into_the_base(whole, task, tmp_path, source, capsys):
    """Into any layout, by one process or several; a model YAML that keeps them apart is refused."""
    yaml, goal = json.loads((task.folder / "train.yaml").read_text()), tmp_path / "goal.yaml"
    yaml["model"]["model_config"]["num_layers"] = 1
    yaml["parallel_config"] = {"data_parallel": 1, "model_parallel": 2, "pipeline_stage": 1}
    goal.write_text(json.dumps(yaml))
    command = ["transform", "--src_checkpoint", whole / "ckpt" / source, "--dst_checkpoint"]
    assert jobs.call([*command, tmp_path / "hf"]) == 0
    assert jobs.call([*command, tmp_path / "cut", "--dst_strategy", goal, "--transform_process_num", 2]) == 0
    back = [command[0], "--src_checkpoint", tmp_path / "cut", "--src_strategy", goal, "--dst_checkpoint"]
    assert jobs.call([*back, tmp_path / "back"]) == 0
    files = [folder / "model.safetensors" for folder in (tmp_path / "hf", tmp_path / "back", whole / "ckpt" / "hf")]
    first, *others = [load_file(file) for file in files]
    for name, array in first.items():
        for other in others:
            np.testing.assert_allclose(other[name], array, rtol=1e-6, atol=1e-7)
    capsys.readouterr()
    goal.write_text(json.dumps(yaml | {"lora_config": {"lora_rank": 4, "lora_alpha": 8, "target_modules": ".*wq"}}))
    assert jobs.call([*command, tmp_path / "apart", "--dst_strategy", goal]) == 2
    assert "its adapters are merged into the weights here" in capsys.readouterr().err
    assert not (tmp_path / "apart").exists()


def assert_same_when_killed(argv, whole, folder, *settings):
    """SIGKILL in a save and in an update; `whole` is the run that was never stopped.

    The saves are written alongside the next step, and those of `whole` at once.
    """
    log, rng = folder / "phases", random.Random(0)
    again = argv(folder / "run", "trainer.async_save=True", *settings, resume_training="auto")
    phases.kill_in(again, log, "save", 2, rng)
    phases.kill_in(again, log, "update", 3, rng)
    phases.to_the_end(again, log)
    assert jobs.Run(folder / "run").responses == jobs.Run(whole).responses
    files = [path.relative_to(whole) for path in (whole / "ckpt").rglob("*.safetensors")]
    assert len(files) == 2 + 3 * STEPS
    for name in files:
        assert (folder / "run" / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_same_run(argv, whole, tmp_path):
    assert_same_when_killed(argv, whole, tmp_path)


@pytest.mark.slow
def test_with_dropout_it_is_the_same_run_too(argv, whole, tmp_path):
    """The masks of an update depend on its number, which is in the checkpoint."""
    dropped = tmp_path / "dropped"
    phases.to_the_end(argv(dropped, "lora.dropout=0.2"), tmp_path / "phases")
    assert jobs.Run(dropped).responses != jobs.Run(whole).responses
    assert_same_when_killed(argv, dropped, tmp_path, "lora.dropout=0.2")


def test_another_base_is_refused_at_resume(argv, whole, task, base, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    other = write_base(tmp_path / "other", task, 1)
    done = jobs.start(argv(tmp_path / "run", resume_training="auto", load_sft_checkpoint_infer=other))
    assert done.returncode == 2
    found = re.search(r"holds adapters of the base model (\S+), whose weights are not those of (\S+);", done.stderr)
    assert found.groups() == (str(base.resolve()), str(other.resolve()))


@pytest.mark.parametrize(("reference", "dropout"), few_of([("base", 0.0)], [("base", 0.1), ("start", 0.0)]))
def test_a_run_begins_with_an_adapter(argv, whole, tmp_path, reference, dropout):
    """The folder says how much of their inputs updates drop."""
    first = tmp_path / "first"
    shutil.copytree(whole / "ckpt" / "hf_adapter", first)
    content = json.loads((first / "adapter_config.json").read_text()) | {"lora_dropout": dropout}
    (first / "adapter_config.json").write_text(json.dumps(content))
    rates = ("optimizer.lr=1e-30", "trainer.total_steps=1", "lora.save=adapter", "algorithm.beta=0.1")
    settings = [setting for setting in SETTINGS if not setting.startswith("lora.")]
    arguments = [word for word in argv(tmp_path / "run") if word not in SETTINGS]
    done = jobs.start([*arguments, *settings, *rates, f"lora.adapter_path={first}", f"lora.reference={reference}"])
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())  # a line may be folded
    assert ("updates drop 10.0% of their inputs, in composed layers" in said) == (dropout > 0)
    left = read_adapter(tmp_path / "run" / "ckpt" / "hf_adapter")
    assert left.adapter == read_adapter(first).adapter
    assert left.adapter.dropout == dropout
    for name, array in read_adapter(first).arrays.items():
        np.testing.assert_allclose(left.arrays[name], array, rtol=1e-6, atol=1e-20)
    assert not (tmp_path / "run" / "ckpt" / "hf").exists()
    kl = jobs.Run(tmp_path / "run").column("actor/kl_loss")[-1]
    assert kl > 1e-3 if reference == "base" else abs(kl) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("train", "infer"), [("tp2", "dp2"), ("pp2", "tp2"), ("dp2zero3", "tp2")])
def test_adapters_of_two_layouts_are_gathered(request, argv, whole, tmp_path, train, infer):
    """Each rank reads its part of the adapter of one process, and rank 0 writes it again."""
    argv, whole = request.getfixturevalue("two_layers") if "pp" in train else (argv, whole)
    first, settings = whole / "ckpt" / "hf_adapter", [setting for setting in SETTINGS if "lora." not in setting]
    arguments = [word for word in argv(tmp_path / "run") if word not in SETTINGS]
    layouts = (*jobs.layout("train", train), *jobs.layout("infer", infer))
    own = (
        "optimizer.lr=1e-30",
        "trainer.total_steps=1",
        f"lora.adapter_path={first}",
        "algorithm.updates_per_iteration=1",
    )
    done = run_ranks(2, [jobs.ONE_STAGE, *map(str, arguments[1:]), *settings, *layouts, *own], timeout=500)
    assert done.returncode == 0, done
    left, stored = read_adapter(tmp_path / "run" / "ckpt" / "hf_adapter"), read_adapter(first)
    assert left.base == replace(stored.base, sha256=left.base.sha256)
    for name, array in stored.arrays.items():
        np.testing.assert_allclose(left.arrays[name], array, rtol=1e-6, atol=1e-20)
    ours, theirs = (load_file(at / "ckpt" / "hf" / "model.safetensors") for at in (tmp_path / "run", whole))
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_every_form_of_the_model_generates_the_same(whole, base, tmp_path):
    """The base with the adapter, the adapter by itself, the merged model, and the training checkpoint."""
    folder = whole / "ckpt"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "What is 3 plus 4?"}\n{"prompt": "2 and 5"}\n')
    forms = {
        "base": (base, "--adapter", folder / "hf_adapter"),
        "alone": (folder / "hf_adapter",),
        "merged": (folder / "hf",),
        "checkpoint": (folder / "latest",),
    }
    answers = {}
    for name, model in forms.items():
        output = tmp_path / f"{name}.jsonl"
        flags = ("--prompts", tmp_path / "prompts.jsonl", "--output", output, "max_new_tokens=8", "temperature=0")
        assert jobs.call(["generate", "--model", *model, *flags, "--log_probs"]) == 0
        rows = [json.loads(line)["responses"][0] for line in output.read_text().splitlines()]
        answers[name] = [row["token_ids"] for row in rows]
        log_probs = [row["log_probs"] for row in rows]
        np.testing.assert_allclose(log_probs, answers.setdefault("log_probs", log_probs), atol=1e-5)
    assert all(answers[name] == answers["merged"] for name in forms)


def test_fine_tuning_leaves_an_adapter(task, base, tmp_path):
    settings = ("lora.rank=2", "lora.save=both", "lora.dropout=0.2")
    done = jobs.start(task.sft(tmp_path, *settings, jobs.ONE_LAYER[0], load_sft_checkpoint_train=base))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "updates drop 20.0% of their inputs, in composed layers" in " ".join(done.stdout.split())
    stored, config = read_adapter(tmp_path / "ckpt" / "hf_adapter"), read_hf_config(base)
    stored.check_fits(config, "base")
    assert stored.adapter.dropout == 0.2
    merged, read = load_file(tmp_path / "ckpt" / "hf" / "model.safetensors"), Weights(str(base), config, 0).reader()
    for spec in parameter_table(config):
        np.testing.assert_allclose(stored.merged(spec, read(spec)), merged[spec.hf_name], rtol=1e-6, atol=1e-7)
