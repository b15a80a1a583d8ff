"""`mindrlhf initialize`: a new model of random weights, as a Hugging Face folder."""

import argparse
from pathlib import Path

from mindrlhf.checkpoint.hf import CONFIG_FILE, save_hf
from mindrlhf.configs.images import PREPROCESSOR_FILE, read_image_settings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.vision import TOKEN_KEYS, TOKENS, with_image_settings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.files.json import read_json
from mindrlhf.files.shipped import shipped_file
from mindrlhf.metrics.progress import Progress, counted
from mindrlhf.models.families import FAMILIES
from mindrlhf.models.parameters import parameter_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shape = f"{CONFIG_FILE} with the model's shape, or its folder; a model that sees has {PREPROCESSOR_FILE} beside it"
    add("--config", required=True, type=Path, help=shape)
    add(
        "--tokenizer_path",
        required=True,
        help="folder of the tokenizer, which gives the tokens' ids",
    )
    add("--output", required=True, type=Path, help="Hugging Face folder to write")
    add("--seed", type=int, default=0, help="of the weights")


def run(args: argparse.Namespace) -> None:
    """Write the folder; norms are 1, biases 0, the rest is normal with `initializer_range`."""
    from mindrlhf.models.initialize import random_tensor  # it imports MindSpore

    given = shipped_file(args.config)
    file = given / CONFIG_FILE if given.is_dir() else given
    tokenizer = Tokenizer.from_path(args.tokenizer_path)
    config = _with_tokens(file, tokenizer, args.tokenizer_path)
    table = parameter_table(config)
    with Progress()("initialize", len(table), "tensors") as advance:
        drawn = counted((random_tensor(spec, config, args.seed) for spec in table), advance)
        save_hf(args.output, config, zip(table, drawn, strict=True), tokenizer=tokenizer)
    print(f"{args.output}: {len(table)} tensors, {sum(spec.size for spec in table):,} parameters")


def _with_tokens(file: Path, tokenizer: Tokenizer, where: str) -> ModelConfig:
    """Read a model's shape, with the tokenizer's vocabulary and ids."""
    raw = read_json(file)
    shape = ModelConfig.from_hf(raw, str(file), seeing=True)
    tokens = {
        "vocab_size": tokenizer.size,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    if shape.vision is None:
        return ModelConfig.from_hf(raw | tokens, str(file))
    for field, token in TOKENS.items():
        tokens[TOKEN_KEYS[field]] = tokenizer.token_to_id(token)
        if tokens[TOKEN_KEYS[field]] is None:
            title = FAMILIES[shape.family].title
            raise UserError(f"{where}: has no {token}, which images of {title} need; give a tokenizer with it.")
    config = ModelConfig.from_hf(raw | tokens, str(file), seeing=True)
    vision = with_image_settings(config.vision, read_image_settings(file.parent), str(file.parent))
    return config.model_copy(update={"vision": vision})
