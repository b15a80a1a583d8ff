"""Runs the peer's script with a model that sees: TRL's GRPOTrainer gets its processor, images and no other work.

ENV/bin/python benchmarks/peer_vision.py peer_grpo_bench.py --load DIR ...

DIR is written by `vision_model.py`. It needs the peer's environment with Pillow. Tokens of images are never drawn, as
with ours: the peer ends in an error when one is. All flags are the script's own. Its function `main` has to use
`Dataset`, `GRPOConfig`, `AutoModelForCausalLM`, `PreTrainedTokenizerFast` and `rule_reward` under these names.
"""

import argparse
import base64
import io
from collections.abc import Sequence
from pathlib import Path

from peer_lora import loaded

MARK = "<image>"


def arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse (own arguments, arguments of the script)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("script", type=Path, help="the peer's benchmark")
    return parser.parse_known_args(argv)


def main() -> None:
    args, rest = arguments()
    script = loaded(args.script, rest)
    from transformers import AutoModelForImageTextToText

    script.PreTrainedTokenizerFast = processors()
    script.AutoModelForCausalLM = models(AutoModelForImageTextToText)
    script.GRPOConfig = without_images(script.GRPOConfig, script.ARGS.load)
    script.Dataset = shown(script.Dataset)
    script.rule_reward = of_messages(script.rule_reward)
    script.main()


def processors() -> type:
    """Derive a processor that answers what the script asks of a tokenizer; it reads no videos."""
    from transformers import AutoTokenizer, Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil

    class Processor(Qwen2_5_VLProcessor):
        def check_argument_for_proper_class(self, name, argument):
            return None if name == "video_processor" else super().check_argument_for_proper_class(name, argument)

        @classmethod
        def from_pretrained(cls, folder):
            tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
            images = Qwen2VLImageProcessorPil.from_pretrained(folder)
            own = cls(images, tokenizer, None, chat_template=tokenizer.chat_template)
            own.eos_token_id, own.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
            return own

        def save_pretrained(self, folder):
            self.tokenizer.save_pretrained(folder)

        def __len__(self):
            return len(self.tokenizer)

    return Processor


def models(auto) -> type:
    """Derive a class of models whose configuration says the vocabulary's size where the script looks for it."""

    class Models:
        @staticmethod
        def from_pretrained(folder, **options):
            model = auto.from_pretrained(folder, **options)
            model.config.vocab_size = model.config.get_text_config().vocab_size
            return model

    return Models


def without_images(config: type, folder: str) -> type:
    """Derive settings under which no token of an image is drawn."""
    from transformers import AutoTokenizer

    names = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
    banned = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(list(names))

    class Settings(config):
        def __init__(self, generation_kwargs=None, **options):
            given = dict(generation_kwargs or {})
            given["suppress_tokens"] = [*given.get("suppress_tokens", []), *banned]
            super().__init__(generation_kwargs=given, **options)

    return Settings


def of_messages(reward):
    """Let a reward of texts take answers as messages."""

    def rule_reward(completions, answer, **fields):
        return reward([messages[0]["content"] for messages in completions], answer, **fields)

    return rule_reward


def shown(dataset: type) -> type:
    """Derive datasets with opened images, for which the peer writes the places itself."""
    from PIL import Image

    class Shown:
        @staticmethod
        def from_list(rows):
            opened = []
            for row in rows:
                messages = [{**one, "content": one["content"].replace(MARK, "")} for one in row["prompt"]]
                images = [Image.open(io.BytesIO(base64.b64decode(one))) for one in row["images"]]
                opened.append({"prompt": messages, "images": images, "answer": row["answer"]})
            return dataset.from_list(opened)

    return Shown


if __name__ == "__main__":
    main()
