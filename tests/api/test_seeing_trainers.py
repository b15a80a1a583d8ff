"""Trainers with a model that sees: rows with images of a program, the command's run, answers, and refusals."""

import base64
import io
import json

import jobs
import numpy as np
import pytest
from PIL import Image
from seeing_task import COLOURS, make_seeing_task

from mindrlhf import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer, UserError
from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.run.picture_rows import read_shown
from mindrlhf.run.training_data import read_problems

RNG = np.random.default_rng(6)
PICTURES = {
    name: Image.fromarray(np.clip(np.array(colour) + RNG.integers(-20, 20, (16, 16, 3)), 0, 255).astype(np.uint8))
    for name, colour in COLOURS.items()
}
SHOWN = {"type": "image"}
WHICH = {"type": "text", "text": "Which colour?"}
ASKED = [{"role": "user", "content": [SHOWN, WHICH]}]
SETTINGS = {"total_steps": 2, "progress": False, "loggers": ["jsonl"]}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return make_seeing_task(tmp_path_factory.mktemp("seeing"), depth=1, layers=1)


@pytest.fixture(scope="module")
def opened(seeing):
    """Its tokenizer and its tower."""
    return Tokenizer.from_path(seeing.model), read_hf_config(seeing.model, seeing=True).vision


def png(image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def answered(name):
    return [*ASKED, {"role": "assistant", "content": [{"type": "text", "text": name}]}]


def write(path, rows):
    """Write rows whose images are objects as a file with their bytes in base64."""
    shown = [row | {"image": base64.b64encode(png(row["image"])).decode()} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in shown))
    return path


TUNING = [{"messages": answered(name), "image": image} for name, image in PICTURES.items()] * 2
PROBLEMS = [{"prompt": ASKED, "image": image, "colour": name} for name, image in PICTURES.items()] * 2


def the_same_prompts(seeing, tmp_path):
    """Rows in the forms that TRL's users have, of one conversation with one picture."""
    red = PICTURES["red"]
    (tmp_path / "red.png").write_bytes(png(red))
    grouped = {"bytes": png(red), "path": None}
    inside = [{"role": "user", "content": [{"type": "image", "image": red}, WHICH]}]
    table = [{"role": "user", "content": [{"type": "image", "text": None}, WHICH]}]
    return [
        {"prompt": ASKED, "image": red},
        {"prompt": ASKED, "images": [red]},
        {"prompt": ASKED, "image": png(red)},
        {"prompt": ASKED, "image": tmp_path / "red.png"},
        {"prompt": ASKED, "image": grouped},
        {"prompt": table, "images": (str(tmp_path / "red.png"),)},
        {"prompt": inside},
        {"prompt": [{"role": "user", "content": "Which colour?"}], "image": red},
    ]


def test_every_form_of_an_image_is_the_same_prompt(seeing, opened, tmp_path):
    tokenizer, vision = opened
    rows = the_same_prompts(seeing, tmp_path)
    found = read_problems("train_dataset", tokenizer, GRPOSettings(), {"train_dataset": rows}, vision=vision)
    assert len({prompt.pictures[0].digest for prompt in found}) == 1
    assert len({prompt.token_ids.tobytes() for prompt in found}) == 1
    answer = {"role": "assistant", "content": "red"}
    tuned = [{"messages": [*row["prompt"], answer]} | row for row in rows]
    shown = read_shown("train_dataset", tokenizer, vision, given=[_without(row, "prompt") for row in tuned])
    assert {one.prompt[0].digest for one in shown} == {found[0].pictures[0].digest}
    assert len({one.turns.prompt_ids.tobytes() for one in shown}) == 1


def _without(row, key):
    return {name: value for name, value in row.items() if name != key}


def test_rows_of_datasets_are_read(opened):
    datasets = pytest.importorskip("datasets")
    tokenizer, vision = opened
    rows = [{"prompt": ASKED, "images": [png(row["image"])], "colour": row["colour"]} for row in PROBLEMS]
    table = datasets.Dataset.from_list(rows)
    table = table.cast_column("images", datasets.List(datasets.Image()))
    given = {"rows": list(table), "own": PROBLEMS}
    found, own = (read_problems(name, tokenizer, GRPOSettings(), given, vision=vision) for name in given)
    assert [one.token_ids.tolist() for one in found] == [one.token_ids.tolist() for one in own]
    assert [one.pictures[0].digest for one in found] == [one.pictures[0].digest for one in own]
    assert isinstance(found[0].objects["images"][0], Image.Image)


def tuner(seeing, folder, rows=TUNING, **arguments):
    settings = {"data": {"pairs_per_step": 3}, "optimizer": {"lr": 1e-2}, "trainer": SETTINGS}
    return SFTTrainer(str(seeing.model), SFTConfig(folder, sft_config=_empty(folder), **settings), rows, **arguments)


def _empty(folder):
    """A file in place of TRL's defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.yaml").write_text("seed: 3\n")
    return str(folder / "settings.yaml")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([TUNING[0], TUNING[1] | {"image": b"no image"}], "train_dataset, row 1: image 1: the bytes are no image"),
        ([TUNING[0], TUNING[1] | {"image": 3}], "train_dataset, row 1: image 1: the image is 3, and must be"),
        ([{"messages": answered("red")}], "train_dataset, row 0: the row has 0 images, and its messages have 1 place"),
        (
            [TUNING[0], {"text": "Red.", "image": PICTURES["red"]}],
            "row 1: a row beside rows with images needs messages",
        ),
    ],
)
def test_a_bad_row_is_one_sentence_with_its_number(seeing, tmp_path, rows, message):
    with pytest.raises(UserError) as error:
        tuner(seeing, tmp_path, rows).train()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_texts_of_a_function_have_no_place_for_images(seeing, tmp_path):
    trainer = tuner(seeing, tmp_path, formatting_func=lambda row: "Red.")
    with pytest.raises(UserError, match=r"row 0: a row beside rows with images needs messages"):
        trainer.train()


def test_a_text_model_refuses_objects_of_images(model, tmp_path):
    with pytest.raises(UserError, match=r"row 0: column 'image' is a Image; .*; images are for a model that sees"):
        SFTTrainer(str(model), SFTConfig(tmp_path, max_steps=1), TUNING).train()
    trainer = SFTTrainer(str(model), SFTConfig(tmp_path, max_steps=1), [{"text": "Red."}])
    with pytest.raises(UserError, match=r"generate: images are given, and the model is of the family qwen2, which"):
        trainer.generate("Which?", images=[PICTURES["red"]])


class Processor:
    """Tokenizer and preparation of images in one object, saved as a processor of transformers is."""

    def __init__(self, folder, **pixels):
        transformers = pytest.importorskip(
            "transformers", reason="transformers, which comes with MindFormers, is absent"
        )
        self.tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        self.image_processor = transformers.Qwen2VLImageProcessor.from_pretrained(folder, **pixels)

    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)


def test_tokenizers_and_processors_are_taken(seeing, tmp_path):
    """The rows are refused behind them."""
    for given in (str(seeing.model), seeing.model, Tokenizer.from_path(seeing.model), Processor(seeing.model)):
        trainer = tuner(seeing, tmp_path, [{"messages": "none"}], processing_class=given)
        with pytest.raises(UserError, match="row 0"):
            trainer.train()


def test_a_tokenizer_or_the_model_s_processor_is_saved(seeing, tmp_path):
    trainer = tuner(seeing, tmp_path, processing_class=Tokenizer.from_path(seeing.model))
    trainer.processing_class.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
    tuner(seeing, tmp_path).processing_class.save_pretrained(tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "preprocessor_config.json").read_text())["max_pixels"] == 256


def test_other_pixels_than_the_checkpoint_s_are_refused(seeing, tmp_path):
    trainer = tuner(seeing, tmp_path, processing_class=Processor(seeing.model, max_pixels=128))
    with pytest.raises(UserError, match=r"its processor has max_pixels 128, and .*model has 256; set it in the"):
        trainer.train()
    with pytest.raises(UserError, match="Qwen2VLImageProcessor, which has no tokenizer"):
        tuner(seeing, tmp_path, processing_class=Processor(seeing.model).image_processor)


@pytest.mark.slow
def test_the_command_tunes_the_same_model(seeing, tmp_path):
    trainer = tuner(seeing, tmp_path / "ours", eval_dataset=TUNING[:3])
    trainer.train()
    rows = write(tmp_path / "rows.jsonl", TUNING)
    flags = ("--load_sft_checkpoint_train", seeing.model, "--mind_dataset_dir", rows, "--enable_compile_cache", True)
    flags += ("--sft_config", tmp_path / "ours" / "settings.yaml", "--save_ckpt_dir", tmp_path / "theirs" / "ckpt")
    given = ("data.pairs_per_step=3", "optimizer.lr=1e-2", "trainer.total_steps=2", "trainer.loggers=[jsonl]")
    held_out = write(tmp_path / "held_out.jsonl", TUNING[:3])
    assert jobs.call(["sft", *flags, *given, f"data.val_dataset={held_out}"]) == 0
    ours, theirs = (jobs.Run(tmp_path / name) for name in ("ours", "theirs"))
    np.testing.assert_equal(ours.kept_metrics, theirs.kept_metrics)
    assert (ours.folder / "ckpt/hf/model.safetensors").read_bytes() == (
        theirs.folder / "ckpt/hf/model.safetensors"
    ).read_bytes()
    assert trainer.evaluate()["eval_loss"] > 0


REWARD = """
def variety(completions, colour, **columns):
    return [len(set(said["content"])) / 10 + (name == "red") for (said,), name in zip(completions, colour)]
"""


@pytest.fixture(scope="module")
def trained(seeing, tmp_path_factory):
    """A trainer after two steps, its folder, and the images and prompts that its reward function was given."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "reward.py").write_text(REWARD)
    namespace, seen = {}, []
    exec(REWARD, namespace)

    def variety(prompts, completions, image, **columns):
        seen.extend(zip(prompts, image, columns["colour"], strict=True))
        return namespace["variety"](completions, **columns)

    settings = {
        "data": {"prompts_per_step": 3},
        "rollout": {"num_generations": 4, "max_new_tokens": 6},
        "optimizer": {"lr": 1e-2},
        "algorithm": {"beta": 0.0},
        "trainer": SETTINGS,
    }
    args = GRPOConfig(folder / "ours", grpo_config=_empty(folder / "ours"), **settings)
    trainer = GRPOTrainer(str(seeing.model), variety, args, PROBLEMS, PROBLEMS[:3])
    trainer.train()
    return trainer, folder, seen


@pytest.mark.slow
def test_the_command_trains_the_same_policy(seeing, trained):
    trainer, folder, _ = trained
    rows = write(folder / "rows.jsonl", PROBLEMS)
    flags = ("--load_sft_checkpoint_train", seeing.model, "--mind_dataset_dir", rows, "--enable_compile_cache", True)
    flags += ("--grpo_config", folder / "ours" / "settings.yaml", "--save_ckpt_dir", folder / "theirs" / "ckpt")
    given = ("data.prompts_per_step=3", "rollout.num_generations=4", "rollout.max_new_tokens=6", "optimizer.lr=1e-2")
    more = ("algorithm.beta=0", "trainer.total_steps=2", f"reward.functions=[{{name: '{folder}/reward.py:variety'}}]")
    held_out = write(folder / "held_out.jsonl", PROBLEMS[:3])
    more += (f"data.val_dataset={held_out}", "validation.reward=all", "trainer.loggers=[jsonl]")
    assert jobs.call(["train", *flags, *given, *more]) == 0
    ours, theirs = (jobs.Run(folder / name) for name in ("ours", "theirs"))
    assert all(row.get("reward/variety/failures", 0) == 0 for row in ours.metrics)
    np.testing.assert_equal(ours.kept_metrics, theirs.kept_metrics)
    assert (ours.folder / "ckpt/hf/model.safetensors").read_bytes() == (
        theirs.folder / "ckpt/hf/model.safetensors"
    ).read_bytes()
    assert 0 < trainer.evaluate()["eval_reward"] < 2


@pytest.mark.slow
def test_reward_functions_get_the_objects_of_the_rows(trained):
    seen = trained[2]
    assert len(seen) >= 2 * 3 * 4
    for prompt, image, colour in seen:
        assert image is PICTURES[colour]
        assert prompt == [{"role": "user", "content": "<image>Which colour?"}]


@pytest.mark.slow
def test_answers_are_those_of_generate(trained, tmp_path, capsys):
    """Images beside messages and inside of them, of the trained model; another picture gives other log-probs."""
    trainer, folder, _ = trained
    images = [PICTURES["red"], PICTURES["blue"]]
    inside = [[{"role": "user", "content": [{"type": "image", "image": image}, WHICH]}] for image in images]
    greedy = {"temperature": 0.0, "max_new_tokens": 6}
    said = trainer.generate([ASKED, ASKED], images=images, **greedy)
    assert trainer.generate(inside, **greedy) == said
    with pytest.raises(UserError, match="images has 1 elements for 2 prompts"):
        trainer.generate([ASKED, ASKED], images=images[:1])
    rows = write(tmp_path / "rows.jsonl", [{"prompt": ASKED, "image": image} for image in images])
    argv = ["generate", "--model", folder / "ours/ckpt/hf", "--prompts", rows, "--output", tmp_path / "out.jsonl"]
    assert jobs.call([*argv, "--log_probs", "temperature=0", "max_new_tokens=6"]) == 0
    found = [json.loads(line)["responses"][0] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [one["text"] for one in found] == said
    assert found[0]["log_probs"] != found[1]["log_probs"]
