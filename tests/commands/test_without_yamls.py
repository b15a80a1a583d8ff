"""Commands without model YAMLs: shape from the checkpoint, layout and device from flags."""

import argparse
import json

import jobs
import pytest

from mindrlhf import cli
from mindrlhf.commands import train
from mindrlhf.flags import TrainFlags
from mindrlhf.trainer.check import check

NONE = {"sft_path_train": None, "sft_path_infer": None, "vocab_path": None, "merges_file_path": None}


@pytest.fixture
def planned(model, task, capsys):
    """The figures of `mindrlhf plan` for the model's folder."""

    def of(*more: str, model=model) -> dict:
        argv = ["plan", "--load_sft_checkpoint_infer", str(model), "--prompt_tokens", "32", "rollout.max_new_tokens=16"]
        assert cli.main([*argv, *more, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return of


def test_the_job_is_that_with_yamls(task, model, tmp_path):
    def job(**flags):
        argv = task.train(tmp_path, load_sft_checkpoint_infer=model, **flags)[1:]
        parser = argparse.ArgumentParser()
        train.add_arguments(parser)
        return check(TrainFlags.of(parser.parse_intermixed_args(argv)))

    ours, theirs = job(**NONE), job()
    assert (ours.model, ours.config) == (theirs.model, theirs.config)
    for role in ("train", "infer"):
        ours_yaml, theirs_yaml = getattr(ours, role), getattr(theirs, role)
        assert (ours_yaml.parallel, ours_yaml.context) == (theirs_yaml.parallel, theirs_yaml.context)


def test_flags_are_the_layout(planned, task, tmp_path):
    flags = ("--data_parallel", "2", "--tensor_parallel", "2", "--pipeline_parallel", "2", "--sequence_parallel")
    figures = planned(*flags, model=jobs.write_model(task, tmp_path / "hf", num_layers=2))
    train, infer = figures["train"], figures["infer"]
    assert [train[key] for key in ("data_parallel", "model_parallel", "pipeline_stage")] == [2, 2, 2]
    assert train["use_seq_parallel"] is True
    assert [infer[key] for key in ("data_parallel", "model_parallel", "pipeline_stage")] == [4, 2, 1]
    assert len(figures["ranks"]) == 8


def test_generation_may_have_another_layout(planned):
    infer = planned("--tensor_parallel", "2", "--infer_tensor_parallel", "1")["infer"]
    assert [infer[key] for key in ("data_parallel", "model_parallel")] == [2, 1]
    infer = planned("--tensor_parallel", "2", "infer_yaml.parallel_config.model_parallel=1")["infer"]
    assert [infer[key] for key in ("data_parallel", "model_parallel")] == [2, 1]


def test_flags_go_over_a_yaml(planned, task):
    yamls = ("--sft_path_train", f"{task.folder}/train.yaml", "--sft_path_infer", f"{task.folder}/infer.yaml")
    figures = planned(*yamls, "--tensor_parallel", "2", "--infer_tensor_parallel", "2")
    assert (figures["train"]["model_parallel"], figures["infer"]["model_parallel"]) == (2, 2)


def test_what_is_wrong_with_the_flags(task, model, output, refused):
    def argv(**flags):
        return task.train(output, **NONE, **flags)

    given = {"load_sft_checkpoint_infer": model}
    refused(argv(), "no model is given", "--load_sft_checkpoint_train", "--sft_path_train")
    refused(argv(**given, device="GPU"), "command line: context.device_target is 'GPU'", "'CPU', 'Ascend'")
    refused(argv(**given, tensor_parallel=0), "parallel_config.model_parallel is 0", "at least 1")
    refused(argv(**given, tensor_parallel=2), "the workers started are 1; start 2 (msrun --worker_num=2)")
    refused(task.sft(output, sft_path_train=None), "no model is given", "--load_sft_checkpoint_train")
