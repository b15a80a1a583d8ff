"""Generation without a training job: `mindrlhf generate`, and from Python.

    from mindrlhf.backend import default_device
    from mindrlhf.backend.process.launch import launch
    from mindrlhf.configs.grpo import SamplingSettings
    from mindrlhf.rollout.generator import Generator

    launch(default_device())
    generator = Generator("path/to/model", SamplingSettings(max_new_tokens=64, temperature=0.7))
    for group in generator.generate(["3 + 4 =", "5 * 6 ="], num_generations=4):
        print([generator.text(rollout) for rollout in group.rollouts])

One process only: no tensor parallelism here.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mindrlhf import backend
from mindrlhf.checkpoint.local import local_model
from mindrlhf.checkpoint.tokenizer import check_token_ids, stop_ids
from mindrlhf.checkpoint.weights import Weights, checkpoint_config, hf_folder
from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.metrics.progress import Advance
from mindrlhf.shapes import longest_position
from mindrlhf.types import Prompt, Rollout, RolloutGroup

if TYPE_CHECKING:
    from mindrlhf.rollout.engine import Engine, Statistics
    from mindrlhf.rollout.partner import Listener, Partner

LENGTH_BUCKET = 32


class Generator:
    """Model with its tokenizer that answers prompts under one sampling rule.

    model: HF directory, a hub's id, a GGUF file, an adapter in PEFT's format, or a training checkpoint. tokenizer: the
    model's by default. slots: most responses generated at once. seed: keys the random numbers, together with a prompt's
    id and a response's index. device_target: `backend.default_device` by default. where: names the prompts in messages.
    adapter: an adapter in PEFT's format, merged into the model. shows: partners may reply with pictures.
    The attribute `sampling` may be changed between calls.
    Raises UserError for a directory that is not a model.
    """

    def __init__(
        self,
        model: str,
        sampling: SamplingSettings,
        *,
        tokenizer: Tokenizer | None = None,
        slots: int = 64,
        seed: int = 0,
        device_target: str | None = None,
        where: str = "prompts",
        adapter: str | None = None,
        shows: bool = False,
    ):
        model = local_model(model)
        self.model = language_model(model, seeing=True)
        self.tokenizer = tokenizer or Tokenizer.from_path(hf_folder(model))
        self.sampling = sampling
        self._slots = slots
        self._where = where
        self._shows = shows
        self._device = backend.find_device(device_target or backend.default_device())
        self._weights = Weights(model, self.model, seed, adapter)
        self._seed = seed
        self._parameters: dict | None = None
        self._engine: Engine | None = None

    def generate(
        self,
        prompts: Sequence[Prompt | str],
        num_generations: int = 1,
        step: int = 0,
        progress: Advance | None = None,
        partner: "Partner | None" = None,
        listen: "Listener | None" = None,
    ) -> list[RolloutGroup]:
        """Generate `num_generations` responses to each prompt, in order.

        A text's id is its index. step: also keys the random numbers; with the step, seed, settings and weights of a
        training step, the responses are the same. progress, listen: see `rollout.engine`. partner: of conversations.
        Raises UserError for prompts that do not fit the model or the tokenizer.
        """
        known = [self._encoded(i, prompt) if isinstance(prompt, str) else prompt for i, prompt in enumerate(prompts)]
        if not known:
            return []
        return self.engine(known, num_generations).generate(known, num_generations, step, progress, partner, listen)

    def engine(self, prompts: Sequence[Prompt], num_generations: int) -> "Engine":
        """Open an engine large enough for these prompts, or return the last one."""
        longest = check_prompts(prompts, self.model, self.tokenizer, self.sampling.max_new_tokens, self._where)
        slots = min(self._slots, len(prompts) * num_generations)
        known = self._engine
        fits = known and known.max_prompt >= longest and known.slots >= slots and known.sampling == self.sampling
        if not fits:
            from mindrlhf.models.decoder import Decoder
            from mindrlhf.rollout.engine import Engine

            self._parameters = self._parameters or self._weights.parameters()
            positions = longest_position(longest, self.sampling.max_new_tokens, LENGTH_BUCKET)
            decoder = Decoder(self.model, self._parameters, self._device.operators(), positions)
            self._engine = Engine(
                self.model,
                decoder,
                self.sampling,
                slots=slots,
                max_prompt=longest,
                stop_ids=stop_ids(self.tokenizer, self.model),
                seed=self._seed,
                length_bucket=LENGTH_BUCKET,
                decode_text=self.tokenizer.decode,
                shows=self._shows,
            )
        return self._engine

    def text(self, rollout: Rollout) -> str:
        """Decode a response without special tokens."""
        return self.decode(rollout.response_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    @property
    def statistics(self) -> "Statistics":
        """Statistics of the last `generate`."""
        return self._engine.statistics

    def _encoded(self, place: int, text: str) -> Prompt:
        ids = self.tokenizer.encode_prompt(text)
        if not ids:
            raise UserError(f"{self._where}: prompt {place} is empty; give it a text.")
        return Prompt(place, np.array(ids, np.int32))


def language_model(path: str, seeing: bool = False) -> ModelConfig:
    """Read the architecture of a checkpoint that can generate.

    seeing: also of a model with images. Raises UserError.
    """
    config = checkpoint_config(path, seeing)
    if config is None:
        raise UserError(f"{path}: has no config.json that describes the model; give an HF directory or a checkpoint.")
    refuse_critic(path, config)
    return config


def refuse_critic(path: str | None, model: ModelConfig | None) -> None:
    """Raise UserError for a model without a vocabulary head."""
    if model is not None and model.value_head:
        raise UserError(f"{path}: is a critic, which has no vocabulary head; give a language model here.")


def check_prompts(
    prompts: Sequence[Prompt], model: ModelConfig, tokenizer: Tokenizer, max_new_tokens: int, where: str
) -> int:
    """Check lengths and ids of all prompts; returns the largest length in tokens."""
    check_token_ids(tokenizer, model, max(int(prompt.token_ids.max()) for prompt in prompts), where)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    room = model.max_position_embeddings - longest
    if max_new_tokens > room:
        raise UserError(
            f"{where}: prompts of up to {longest} tokens with max_new_tokens {max_new_tokens} are longer than the "
            f"model's {model.max_position_embeddings} positions; "
            + (f"set max_new_tokens to {room} or fewer." if room > 0 else "use shorter prompts.")
        )
    return longest
