"""Answers of a trainer's model, outside of training."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mindrlhf.api.config import Config
from mindrlhf.backend.process.launch import started_workers
from mindrlhf.configs.loading import load_settings
from mindrlhf.configs.yaml_file import Layer
from mindrlhf.errors import UserError

if TYPE_CHECKING:
    from mindrlhf.rollout import generator
    from mindrlhf.types import Prompt


class Answering:
    """Part of a trainer: generation with its current weights."""

    sampling: ClassVar[str]  # group of settings for `generate`
    args: Config
    _path: str | None
    _trained: str | None
    _tokenizer: str | None
    _busy: bool
    _generator: tuple[Any, "generator.Generator"] | None

    def generate(
        self,
        prompts: Sequence[Any] | str,
        num_generations: int = 1,
        seed: int = 0,
        images: Sequence[Any] | None = None,
        **sampling: Any,
    ) -> list[Any]:
        """Answer prompts with the trained model, or the initial one before a training.

        prompts: texts, or lists of messages. images: for a model that sees, of each prompt one or a list; they stand at
        its parts of the type image, at its marks `<image>`, or before its first question. sampling: `temperature`,
        `max_new_tokens` and so on, instead of the configuration's. Returns a text, or with several generations a list,
        for each prompt. One process only.
        """
        if started_workers() > 1:
            raise UserError("generate: msrun started several processes; call it in a script that one process runs.")
        if self._busy:
            raise UserError("generate: a training is under way; wait for its end, or close its iterator.")
        generator = self._open_generator(seed, sampling)
        asked = [prompts] if isinstance(prompts, str) else list(prompts)
        groups = generator.generate(self._written(asked, images, generator), num_generations)
        texts = [[generator.text(rollout) for rollout in group.rollouts] for group in groups]
        return texts if num_generations > 1 else [text for (text,) in texts]

    def _written(
        self, asked: Sequence[Any], images: Sequence[Any] | None, opened: "generator.Generator"
    ) -> list["Prompt"]:
        """Write prompts as ids, with their images. Raises UserError."""
        variables = self.args.settings().data.chat_template_kwargs
        if vision := opened.model.vision:
            from mindrlhf.run.picture_prompts import PictureForm, PicturePrompts

            reader = PicturePrompts(opened.tokenizer, vision, "prompts", PictureForm(variables=variables))
            return reader.of_given(asked, images)
        if images is not None:
            found = f"generate: images are given, and the model is of the family {opened.model.family}"
            raise UserError(f"{found}, which takes text alone; leave them out.")
        from mindrlhf.data.requests import given_prompts

        return given_prompts(asked, opened.tokenizer, variables)

    def _open_generator(self, seed: int, sampling: Mapping[str, Any]) -> "generator.Generator":
        """Open the generator of the current weights, or return the last one."""
        from mindrlhf.backend import default_device
        from mindrlhf.backend.process.launch import launch
        from mindrlhf.configs.grpo import SamplingSettings

        model = self._trained or self._path
        if model is None:
            raise UserError("generate: there is no model yet; call train first.")
        group = getattr(self.args.settings(), self.sampling)
        device = self.args.flag("device_target") or default_device()
        base = {name: getattr(group, name) for name in SamplingSettings.model_fields}
        settings = load_settings(SamplingSettings, given=Layer(base | dict(sampling), {(): "generate"}))
        key = model, settings, seed, device
        if self._generator is None or self._generator[0] != key:
            launch(device)
            from mindrlhf.checkpoint.local import local_model
            from mindrlhf.checkpoint.tokenizer import named_tokenizer
            from mindrlhf.rollout import generator

            path = self._tokenizer or self.args.flag("tokenizer_path")
            tokenizer = named_tokenizer(path, local_model(model)) if path else None
            made = generator.Generator(model, settings, tokenizer=tokenizer, seed=seed, device_target=device)
            self._generator = key, made
        return self._generator[1]
