"""Description of a model family: its differences from other families, as data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# MindFormers' class and model type for the shape of a Llama, with or without biases.
LLAMA_CLASS, LLAMA_TYPE = "LlamaConfig", "llama"


@dataclass(frozen=True)
class Chat:
    """Markup of a conversation.

    name: the prompt template's name (`--template`).
    before, between, after: the text around a turn's role and content.
    opening: the text before the first turn.
    system: the system prompt for a tokenizer without a chat template.
    image: the text of an image in a content that is a list of parts; "" for models that do not see.
    """

    name: str
    before: str
    between: str
    after: str
    opening: str = ""
    system: str = ""
    image: str = ""

    def turn(self, role: str, content: str) -> str:
        """Text of one turn."""
        return f"{self.before}{role}{self.between}{content}{self.after}"

    @property
    def chat_template(self) -> str:
        """Write the same markup as a chat template in HF's dialect."""
        before, content = self._parts() if self.image else ("", "{{ message.content }}")
        turn = self.turn("{{ message.role }}", content)
        answer = f"{{% if add_generation_prompt %}}{self.before}assistant{self.between}{{% endif %}}"
        return f"{before}{self.opening}{{% for message in messages %}}{turn}{{% endfor %}}{answer}"

    def _parts(self) -> tuple[str, str]:
        """Write a content of parts: what stands before all messages, and the content.

        With the variable `add_vision_id`, images are numbered over the conversation.
        """
        number = "{% set seen.images = seen.images + 1 %}{% if add_vision_id %}Picture {{ seen.images }}: {% endif %}"
        image = f"{{% if part.type == 'image' %}}{number}{self.image}"
        parts = f"{{% for part in message.content %}}{image}{{% else %}}{{{{ part.text }}}}{{% endif %}}{{% endfor %}}"
        content = f"{{% if message.content is string %}}{{{{ message.content }}}}{{% else %}}{parts}{{% endif %}}"
        return "{% set seen = namespace(images=0) %}", content


@dataclass(frozen=True)
class Vocabulary:
    """Tokenizer settings that `vocab.json` and `merges.txt` lack.

    split: regular expression that cuts text before byte-level BPE; gguf: its names in GGUF files.
    control: special tokens in the order of their ids; markup: added tokens that decode as ordinary text, after them.
    config: content of `tokenizer_config.json`.
    """

    split: str
    gguf: tuple[str, ...]
    control: tuple[str, ...]
    markup: tuple[str, ...]
    config: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Family:
    """Decoder family.

    name: HF's `model_type`; also the name of the family's file.
    title: the names of its models, for messages.
    hf_class, hf_head: the beginning and the end of HF's class names, as in `Qwen2ForCausalLM`.
    chat: the markup of its conversations.
    end_tokens: the tokens that end a response, in addition to the end tokens of a checkpoint and its tokenizer.
    end_of_text: the end token of a tokenizer that names none.
    attention_bias: biases on the query, key and value projections.
    qk_norm: RMSNorm over each query and key head.
    experts: some layers have experts.
    sees: the model has a vision tower.
    hf_defaults: by our fields, values of keys that a `config.json` omits, if they differ from `ModelConfig`'s.
    without: boolean keys of a `config.json` that must not be true.
    hf_settings: further content of its `config.json`.
    mindformers: MindFormers' configuration class for this family alone, if it has one.
    as_llama: MindFormers also writes it as `LlamaConfig`; the biases distinguish such families.
    vocabulary: for a family that publishes `vocab.json` and `merges.txt`.
    gguf: its architecture in GGUF files, if they are read and written.
    gguf_heads: projections whose rows have another order there (the two halves of a head alternate) -> field of the
        model with their number of heads.
    halves: (model, index of a decoder layer) -> names of its attention half and feed-forward half in `models.layer`.
    layer_rows: (model, index of a decoder layer, its rows in `models.parameters`) -> this family's rows of the layer,
        with its names and further parameters.
    model_rows: (model, rows of the whole model) -> this family's rows of the model.
    in_memory: name in a checkpoint -> in memory of transformers, by which PEFT's files name adapters.
    """

    name: str
    title: str
    hf_class: str
    chat: Chat
    end_tokens: tuple[str, ...]
    end_of_text: str
    attention_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    sees: bool = False
    hf_head: str = "CausalLM"
    hf_defaults: Mapping[str, object] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    hf_settings: Mapping[str, object] = field(default_factory=dict)
    mindformers: str | None = None
    as_llama: bool = False
    vocabulary: Vocabulary | None = None
    gguf: str | None = None
    gguf_heads: Mapping[str, str] = field(default_factory=dict)
    halves: Callable[[Any, int], tuple[str, str]] = lambda model, layer: ("attention", "feed_forward")
    layer_rows: Callable[[Any, int, list], list] = lambda model, layer, rows: rows
    model_rows: Callable[[Any, list], list] = lambda model, rows: rows
    in_memory: Callable[[str], str] = str

    def all_halves(self, model: Any) -> set[str]:
        """Collect the names of the halves of all layers."""
        return {name for layer in range(model.num_layers) for name in self.halves(model, layer)}
