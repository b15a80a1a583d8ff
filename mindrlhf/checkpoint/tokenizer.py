"""Tokenizer of a command with a model, and its tokens that end a response."""

from mindrlhf.checkpoint.local import local_model
from mindrlhf.checkpoint.weights import hf_folder
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
        named = flags.tokenizer_path and local_model(flags.tokenizer_path, weights=False)
        return Tokenizer.from_path(named or hf_folder(checkpoint) or checkpoint)
    raise UserError("no tokenizer is given; use --vocab_path with --merges_file_path, or --tokenizer_path.")


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
