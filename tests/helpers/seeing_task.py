"""A practice task with images: which colour a small picture has, and a model of random weights that sees."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from PIL import Image
from small_model import random_arrays, small_config
from small_tower import small_tower

from mindrlhf.checkpoint.hf import save_hf
from mindrlhf.data.tokenizer import Tokenizer, train_tokenizer
from mindrlhf.models.families import FAMILIES
from mindrlhf.models.parameters import parameter_table

FAMILY = FAMILIES["qwen2_5_vl"]
COLOURS = {"red": (220, 30, 40), "green": (20, 200, 60), "blue": (30, 50, 230)}
REWARD = """
def likes(prompt, completion, fields):
    return fields["level"] + len(set(completion)) / 10
"""
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


@dataclass(frozen=True)
class SeeingTask:
    """A model's folder, and rows of training; `swapped` has the same rows with another colour's picture each.

    asked: the questions of the rows as problems, with a further column, `level`. alike: those with one image. `likes`,
    a reward for them, is in `reward.py` beside the rows.
    """

    model: Path
    rows: Path
    swapped: Path
    asked: Path
    alike: Path

    def training(self, output: Path, *settings: str, **flags: object) -> list[str]:
        """Words of a training on the rows with one image, into a folder, unless flags say otherwise."""
        given = {"load_sft_checkpoint_train": self.model, "mind_dataset_dir": self.alike}
        given |= {"save_ckpt_dir": output / "ckpt", "save_data_file": output / "rollouts.mindrecord"}
        words = [str(part) for name, value in (given | flags).items() for part in (f"--{name}", value)]
        return ["train", *words, *settings]


def make_seeing_task(folder: Path, depth: int = 2, layers: int = 2) -> SeeingTask:
    """depth, layers: of the tower and of the text."""
    tokenizer = make_tokenizer(folder / "tokenizer")
    vision = small_tower(depth, max_pixels=256, **image_ids(tokenizer))
    config = small_config(vocab_size=tokenizer.size, family=FAMILY.name, vision=vision, num_layers=layers)
    arrays = random_arrays(config, 1)
    save_hf(
        folder / "model", config, ((spec, arrays[spec.name]) for spec in parameter_table(config)), tokenizer=tokenizer
    )
    names = list(COLOURS)
    write_rows(folder / "rows.jsonl", {name: name for name in names})
    write_rows(folder / "swapped.jsonl", dict(zip(names, [*names[1:], names[0]], strict=True)))
    write_problems(folder)
    (folder / "reward.py").write_text(REWARD)
    return SeeingTask(folder / "model", *(folder / f"{name}.jsonl" for name in ("rows", "swapped", "asked", "alike")))


def image_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """The tokens of images, by their settings of a tower."""
    return {
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
    }


def make_tokenizer(folder: Path) -> Tokenizer:
    """A byte-level tokenizer with the tokens of images, and the family's chat template."""
    train_tokenizer([f"Which colour? {name}" for name in COLOURS] * 20, 300).save(folder)
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.add_special_tokens(list(SPECIAL))
    core.save(str(folder / "tokenizer.json"))
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config = {key: value for key, value in config.items() if key != "added_tokens_decoder"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": FAMILY.chat.chat_template}))
    return Tokenizer.from_path(folder)


def write_rows(path: Path, shown: dict[str, str]) -> None:
    """Four rows for each colour: paths and base64 by turns, one image or two. shown: answer -> the picture's colour."""
    rng = np.random.default_rng(4)
    rows = []
    for number in range(4):
        for answer, colour in shown.items():
            pixels = np.clip(np.array(COLOURS[colour]) + rng.integers(-20, 20, (16, 16, 3)), 0, 255).astype(np.uint8)
            file = path.parent / "images" / f"{path.stem}_{answer}_{number}.png"
            file.parent.mkdir(exist_ok=True)
            Image.fromarray(pixels).save(file)
            text = base64.b64encode(file.read_bytes()).decode()
            image = f"images/{file.name}" if number % 2 else f"data:image/png;base64,{text}"
            question = "<image>Which colour?" if number < 3 else "<image> and <image>: Which colour?"
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            rows.append({"messages": messages, "images": [image] * question.count("<image>")})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_problems(folder: Path) -> None:
    """Write demonstrations as problems, by turns with messages and with a question."""
    problems = []
    for number, line in enumerate((folder / "rows.jsonl").read_text().splitlines()):
        row = json.loads(line)
        asked, answered = (message["content"] for message in row["messages"])
        form = {"question": asked} if number % 2 else {"messages": row["messages"][:1]}
        problems.append({**form, "ground_truth": answered, "level": 5, "images": row["images"]})
    for name, most in (("asked", 2), ("alike", 1)):
        kept = [json.dumps(row) + "\n" for row in problems if len(row["images"]) <= most]
        (folder / f"{name}.jsonl").write_text("".join(kept))
