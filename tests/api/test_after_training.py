"""What TRL's programs call around a training: uploads, metrics in files, the model card, objects by their path."""

import json
from dataclasses import dataclass

import pytest
from hub_server import serving

import mindrlhf
from mindrlhf import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer, UserError
from mindrlhf.data.tokenizer import Tokenizer

KEYS = {"per_device_train_batch_size": 4, "max_steps": 2, "report_to": "none", "disable_tqdm": True}
ROWS = [{"text": f"{a} + {b} = {a + b}"} for a in range(4) for b in range(3)]


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "my-model"
    keys = {"hub_model_id": "me/sums", "hub_token": "secret", "hub_private_repo": True}
    trainer = SFTTrainer(model, SFTConfig(folder, logging_steps=1, **keys, **KEYS), ROWS)
    return trainer, trainer.train()


@pytest.fixture
def online(monkeypatch):
    with serving() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        hub.token = "secret"
        yield hub


def test_the_model_is_uploaded(trained, online):
    trainer, _ = trained
    address = trainer.push_to_hub(dataset_name="me/rows", tags=["sums"])
    assert address == f"{online.address}/me/sums"
    assert online.created["me/sums"]["private"] is True
    files = online.uploaded["me/sums", "main"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files.keys()
    assert files["model.safetensors"] == (trainer.checkpoints / "hf" / "model.safetensors").read_bytes()
    card = files["README.md"].decode()
    assert "datasets:\n- me/rows\n" in card
    assert "tags:\n- mindrlhf\n- sums\n" in card
    assert online.messages == ["End of training"]


def test_another_branch_and_message(trained, online):
    trainer, _ = trained
    trainer.push_to_hub("First try", revision="trial")
    assert online.messages == ["First try"]
    assert ("me/sums", "trial") in online.uploaded


def test_the_configuration_uploads_at_the_end(model, tmp_path, online):
    args = SFTConfig(tmp_path / "run-7", push_to_hub=True, hub_token="secret", **KEYS | {"max_steps": 1})
    SFTTrainer(model, args, ROWS).train()
    assert "model.safetensors" in online.uploaded["me/run-7", "main"]


def test_refusals_of_an_upload(trained, model, tmp_path, online, monkeypatch):
    trainer, _ = trained
    with pytest.raises(UserError, match=r"push_to_hub: http.* refused me/sums .*log in with `hf auth login`, or give"):
        trainer.push_to_hub(token="wrong")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set, .*unset it, or .* with `hf upload NAME FOLDER`"):
        trainer.push_to_hub()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"http://127.0.0.1:9 cannot be reached"):
        trainer.push_to_hub()
    with pytest.raises(UserError, match="save_model: nothing is trained yet"):
        SFTTrainer(model, SFTConfig(tmp_path, **KEYS), ROWS).push_to_hub()


def test_metrics_and_state_in_files(trained, capsys):
    trainer, result = trained
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", {"loss": 1.5})
    trainer.save_metrics("eval", {"eval_loss": float("nan")})
    trainer.save_state()
    assert "train metrics:\n" in capsys.readouterr().out
    read = {name: json.loads((trainer.output / f"{name}.json").read_text()) for name in ("all_results", "eval_results")}
    assert read == {"all_results": {"loss": 1.5, "eval_loss": None}, "eval_results": {"eval_loss": None}}
    state = json.loads((trainer.output / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert [one["step"] for one in state["log_history"]] == [1, 2]


def test_the_card_has_given_facts(trained):
    trainer, _ = trained
    trainer.create_model_card(model_name="Sums", dataset_name="me/rows", tags="math")
    text = (trainer.output / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: transformers\n")
    assert "model_name: Sums\n" in text
    assert text.count("mindrlhf") >= 2


def test_model_tokenizer_and_accelerator(trained, tmp_path):
    trainer, _ = trained
    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(tmp_path / "model")
    trainer.processing_class.save_pretrained(tmp_path / "tokenizer")
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert Tokenizer.from_path(tmp_path / "tokenizer").encode("1 + 2") == Tokenizer.from_path(trainer.model).encode(
        "1 + 2"
    )
    assert trainer.accelerator.is_main_process
    assert trainer.is_world_process_zero()
    trainer.accelerator.wait_for_everyone()
    with pytest.raises(AttributeError, match=r"is a path here .* without generate; load the folder of save_model"):
        trainer.model.generate()
    with pytest.raises(AttributeError, match="has no backward here"):
        trainer.accelerator.backward(0)


def test_a_finished_run_is_remembered(trained, model):
    trainer, result = trained
    again = SFTTrainer(model, trainer.args, ROWS)
    resumed = again.train(resume_from_checkpoint=True)
    assert resumed.metrics == {**result.metrics}
    assert (resumed.global_step, resumed.training_loss) == (2, result.training_loss)
    assert again.state.log_history == trainer.state.log_history


@dataclass
class Config:
    _name_or_path: str


@dataclass
class Wrapped:
    """A model whose configuration alone knows its path."""

    config: Config


class Loaded:
    """Stands for a model of transformers."""

    def __init__(self, path):
        self.name_or_path = str(path)


class Adapted(Loaded):
    """With adapters of PEFT."""

    peft_config = {"default": 1}


def test_objects_of_transformers_are_read_from_their_path(model, tmp_path, capsys):
    named = Loaded(model)
    assert GRPOTrainer(named, "gsm8k", GRPOConfig(tmp_path), [{"prompt": "a", "ground_truth": "1"}]).model == str(model)
    assert f"it is read again from {model}, without changes made in memory" in capsys.readouterr().out
    assert SFTTrainer(Wrapped(Config(str(model))), SFTConfig(tmp_path, **KEYS), ROWS).model == str(model)
    with pytest.raises(UserError, match="SFTTrainer: model is an object, Adapted with adapters of"):
        SFTTrainer(Adapted(model), SFTConfig(tmp_path), ROWS)
    with pytest.raises(UserError, match="without a path, and models are read from disk here"):
        SFTTrainer(Loaded(""), SFTConfig(tmp_path), ROWS)


@pytest.mark.parametrize(
    "name",
    ["data_collator", "compute_metrics", "quantization_config", "compute_loss_func", "optimizer_cls_and_kwargs"],
)
def test_arguments_that_are_not_done_are_refused_by_name(model, tmp_path, name):
    with pytest.raises(UserError, match=f"SFTTrainer: {name} is given, which is not done here; .*[a-z]"):
        SFTTrainer(model, SFTConfig(tmp_path), ROWS, **{name: object()})


def test_grpo_refuses_them_too(model, tmp_path):
    with pytest.raises(UserError, match="GRPOTrainer: quantization_config is given"):
        GRPOTrainer(model, "gsm8k", GRPOConfig(tmp_path), ROWS, quantization_config=object())
    with pytest.raises(UserError, match="GRPOTrainer: optimizers is given"):
        GRPOTrainer(model, "gsm8k", GRPOConfig(tmp_path), ROWS, optimizers=(object(), None))


def test_whole_texts_in_three_forms(model, tmp_path):
    plain = SFTTrainer(model, SFTConfig(tmp_path, **KEYS), ROWS)
    renamed = [{"content": row["text"], "x": 1} for row in ROWS]
    field = SFTTrainer(model, SFTConfig(tmp_path, dataset_text_field="content", **KEYS), renamed)
    made = SFTTrainer(model, SFTConfig(tmp_path, **KEYS), renamed, formatting_func=lambda row: row["content"])
    assert plain._datasets["train_dataset"] == field._datasets["train_dataset"] == made._datasets["train_dataset"]
    with pytest.raises(UserError, match="train_dataset, row 0: formatting_func gives list, and must give one text"):
        SFTTrainer(model, SFTConfig(tmp_path), renamed, formatting_func=lambda row: [row["content"]])
    with pytest.raises(UserError, match=r"formatting_func needs rows, and a.jsonl is a file"):
        SFTTrainer(model, SFTConfig(tmp_path), "a.jsonl", formatting_func=lambda row: "")


def test_what_is_trained_is_told_when_nothing_asks_for_it(model, tmp_path, capsys):
    rows = [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}] * 4
    SFTTrainer(model, SFTConfig(tmp_path, **KEYS), rows)
    assert "assistant_only_loss is left out: of messages only the answers are trained" in capsys.readouterr().out
    SFTTrainer(model, SFTConfig(tmp_path, assistant_only_loss=True, **KEYS), rows)
    SFTTrainer(model, SFTConfig(tmp_path, **KEYS), ROWS)
    assert "assistant_only_loss" not in capsys.readouterr().out


NAMES = ["DPOTrainer", "RewardTrainer", "RLOOTrainer", "KTOTrainer", "TrlParser", "ModelConfig", "ScriptArguments"]


@pytest.mark.parametrize("name", [*NAMES, "get_peft_config", "RLOOConfig", "DPOConfig"])
def test_names_of_trl_that_are_not_here_are_answered(name):
    with pytest.raises(ImportError, match=f"^mindrlhf has no {name}: [a-zA-Z]"):
        exec(f"from mindrlhf import {name}")
    assert name not in dir(mindrlhf)


def test_functions_of_trl_s_rewards_are_answered():
    with pytest.raises(ImportError, match=r"mindrlhf.rewards has no think_format_reward: in its place is the shipped"):
        from mindrlhf.rewards import think_format_reward  # noqa: F401
    assert not hasattr(mindrlhf.rewards, "nothing")
