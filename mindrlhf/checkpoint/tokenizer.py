"""Tokenizer of a command with a model, and its tokens that end a response."""

from mindrlhf.checkpoint.local import local_model
from mindrlhf.checkpoint.weights import hf_folder
from mindrlhf.configs.images import PREPROCESSOR_FILE, ImageSettings, has_image_settings, read_image_settings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.flags import TokenizerFlags
from mindrlhf.models.families import FAMILIES


def open_tokenizer(flags: TokenizerFlags, checkpoint: str | None) -> Tokenizer:
    """Open the tokenizer that the flags name, or the checkpoint's own."""
    if flags.vocab_path or flags.merges_file_path:
        if not (flags.vocab_path and flags.merges_file_path):
            raise UserError("--vocab_path and --merges_file_path belong together; give both, or --tokenizer_path.")
        return Tokenizer.from_files(flags.vocab_path, flags.merges_file_path)
    if flags.tokenizer_path or checkpoint:
        if flags.tokenizer_path:
            return named_tokenizer(flags.tokenizer_path, checkpoint)
        return Tokenizer.from_path(hf_folder(checkpoint) or checkpoint)
    raise UserError("no tokenizer is given; use --vocab_path with --merges_file_path, or --tokenizer_path.")


def named_tokenizer(path: str, checkpoint: str | None) -> Tokenizer:
    """Open a tokenizer in place of the checkpoint's own.

    Its folder may have the preparation of images too, which has to be the checkpoint's. Raises UserError.
    """
    folder = local_model(path, weights=False)
    own = checkpoint and hf_folder(checkpoint)
    if own and has_image_settings(folder) and has_image_settings(own):
        theirs, ours = (read_image_settings(one) for one in (folder, own))
        for name in ImageSettings.model_fields:
            given, known = (getattr(one, name) for one in (theirs, ours))
            if given != known:
                right = f"set it in the {PREPROCESSOR_FILE} of the model"
                raise UserError(f"{path}: its processor has {name} {given}, and {own} has {known}; {right}.")
    return Tokenizer.from_path(folder)


def check_token_ids(tokenizer: Tokenizer, model: ModelConfig, largest: int, where: str) -> None:
    """Check that tokenizer and dataset `where` fit the model's embedding."""
    size = tokenizer.size
    limit = model.vocab_size
    if size > limit:
        found = f"the tokenizer has {size} tokens and the model's vocab_size is {limit}"
        raise UserError(f"{found}; give the vocab.json and merges.txt of this model.")
    if largest >= size:
        found = f"{where}: token id {largest} is beyond the tokenizer's {size} tokens"
        raise UserError(f"{found}; convert the data with the vocab.json and merges.txt that are given here.")


def stop_ids(tokenizer: Tokenizer, model: ModelConfig) -> tuple[int, ...]:
    """Collect the tokens that end a response: the model's, the tokenizer's, the family's."""
    ends = map(tokenizer.token_to_id, FAMILIES[model.family].end_tokens)
    own = {*model.eos_token_ids, tokenizer.eos_token_id, *ends}
    return tuple(sorted(i for i in own if i is not None and i < model.vocab_size))


def stopping_config(tokenizer: Tokenizer, model: ModelConfig) -> ModelConfig:
    """Add all tokens that end a response to the model's configuration, for export."""
    every = (*model.eos_token_ids, *stop_ids(tokenizer, model))
    return model.model_copy(update={"eos_token_ids": tuple(dict.fromkeys(every))})
