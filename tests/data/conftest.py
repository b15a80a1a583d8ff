"""Tokenizers and a command runner for the data tests."""

import argparse
import importlib

import pytest

from mindrlhf.data.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def qwen(shared) -> Tokenizer:
    """Qwen2.5's tokenizer from vocab.json, merges.txt and the tokenizer_config.json beside them."""
    folder = shared / "data" / "qwen2_5_tokenizer"
    return Tokenizer.from_files(folder / "vocab.json", folder / "merges.txt")


@pytest.fixture(scope="session")
def small() -> Tokenizer:
    """A byte-level tokenizer with a few merges; eos `<|im_end|>` differs from pad `<|endoftext|>`."""
    return train_tokenizer(["How many apples does Tom have left?", "3+4=7 #### 7"] * 20, 320)


@pytest.fixture(scope="session")
def run_command():
    """Runs `mindrlhf NAME ARGUMENTS...` without the command line's error handling."""

    def run(name, *arguments):
        command = importlib.import_module(f"mindrlhf.commands.{name}")
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        command.run(parser.parse_args([str(argument) for argument in arguments]))

    return run
