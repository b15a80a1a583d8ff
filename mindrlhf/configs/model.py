"""Architecture of a decoder, and its HF `config.json`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from mindrlhf.configs.base import Float32, Settings
from mindrlhf.configs.lora import Adapter
from mindrlhf.configs.model_names import HF_EXPERT_KEYS, HF_KEYS, HF_SPELLINGS
from mindrlhf.configs.problems import brief, build
from mindrlhf.configs.unsupported import WITH_IMAGES, unsupported
from mindrlhf.configs.vision import SECTIONED, PartName, VisionConfig, flattened, read_vision
from mindrlhf.configs.yaml_file import Layer
from mindrlhf.errors import UserError
from mindrlhf.models.families import DEFAULT, FAMILIES, Family

# Larger numbers are of no model; tables of layers and shapes would fill the memory before a file is read.
MOST_LAYERS, MOST_WIDTH, MOST_TOKENS = 1 << 12, 1 << 20, 1 << 24
MOST_EXPERTS = 1 << 12
LAST_TOKEN_ID = 2**31 - 1  # ids are int32; some checkpoints write -1 for an absent token
TokenId = Annotated[int, Field(ge=-1, le=LAST_TOKEN_ID, strict=True)]
CRITIC = "SequenceClassification"  # HF's class for a model with one number as its output
NO_SCALING, LLAMA3 = "default", "llama3"  # HF's `rope_type`


class Llama3Scaling(Settings):
    """Llama 3's scaling, for contexts longer than the first training's.

    Wavelengths beyond original_max_position_embeddings / low_freq_factor are stretched by `factor`, wavelengths below
    original_max_position_embeddings / high_freq_factor stay, and those between are interpolated.
    """

    factor: Float32 = Field(ge=1.0, description="Stretch of the longest wavelengths.")
    low_freq_factor: Float32 = Field(gt=0.0, description="Full turns of the shortest stretched wavelength.")
    high_freq_factor: Float32 = Field(gt=0.0, description="Full turns of the longest unchanged wavelength.")
    original_max_position_embeddings: int = Field(
        ge=1, description="Longest sequence of the first training, in tokens."
    )

    @model_validator(mode="after")
    def _ordered(self):
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"high_freq_factor {self.high_freq_factor} must be above low_freq_factor")
        return self

    def to_hf(self) -> dict[str, Any]:
        """Build the `rope_scaling` of an HF `config.json`."""
        return {"rope_type": LLAMA3, **self.model_dump()}


def _read(value: Any) -> Any:
    """Read the scaling from HF's or MindFormers' group; a number means none."""
    if not isinstance(value, Mapping):
        return None if isinstance(value, int | float) else value
    kind = value.get("rope_type", value.get("type", LLAMA3 if "low_freq_factor" in value else NO_SCALING))
    if kind not in (NO_SCALING, LLAMA3):
        found = f"rotary scaling {kind!r:.60} is not supported"
        raise ValueError(f"{found}; remove rope_scaling or use '{NO_SCALING}' or '{LLAMA3}'")
    numbers = {key: number for key, number in value.items() if key in Llama3Scaling.model_fields}
    return numbers if kind == LLAMA3 else None


RotaryScaling = Annotated[Llama3Scaling | None, BeforeValidator(_read)]


class ModelConfig(Settings):
    """Architecture of one decoder of a supported family (`mindrlhf.models.families`).

    Sliding windows, and other rotary scaling than Llama 3's, are refused.
    """

    family: Literal[tuple(FAMILIES)] = Field(DEFAULT.name, description="Model family, by HF's `model_type`.")
    vocab_size: int = Field(ge=1, le=MOST_TOKENS, description="Rows of the embedding, at least the tokenizer's size.")
    hidden_size: int = Field(ge=1, le=MOST_WIDTH, description="Width of the residual stream.")
    intermediate_size: int = Field(ge=1, le=MOST_WIDTH, description="Width of the feed-forward layer.")
    num_layers: int = Field(ge=1, le=MOST_LAYERS, description="Decoder layers.")
    num_heads: int = Field(ge=1, le=MOST_WIDTH, description="Query heads.")
    num_kv_heads: int = Field(
        ge=1, le=MOST_WIDTH, description="Key and value heads, each for num_heads / num_kv_heads query heads."
    )
    head_dim: int = Field(ge=1, le=MOST_WIDTH, description="Width of one head, even.")
    attention_bias: bool = Field(True, description="Biases of the query, key and value projections.")
    qk_norm: bool = Field(False, description="RMSNorm over each query and key head.")
    rms_norm_eps: Float32 = Field(1e-6, gt=0.0, description="Epsilon of RMSNorm.")
    rope_theta: Float32 = Field(1e6, gt=0.0, description="Base of the rotary embedding's frequencies.")
    rope_scaling: RotaryScaling = Field(None, description="Llama 3's scaling of the rotary frequencies; null is none.")
    max_position_embeddings: int = Field(32768, ge=1, le=LAST_TOKEN_ID, description="Longest sequence, in tokens.")
    tie_word_embeddings: bool = Field(False, description="The head is the embedding's own matrix.")
    num_experts: int = Field(0, ge=0, le=MOST_EXPERTS, description="Experts of a layer; 0 is a dense model.")
    num_experts_per_tok: int = Field(0, ge=0, le=MOST_EXPERTS, description="Experts that compute each token.")
    moe_intermediate_size: int = Field(0, ge=0, le=MOST_WIDTH, description="Width of one expert.")
    norm_topk_prob: bool = Field(False, description="Weights of a token's experts are divided by their sum.")
    decoder_sparse_step: int = Field(1, ge=1, description="Every n-th layer has experts; the others are dense.")
    mlp_only_layers: tuple[Annotated[int, Field(ge=0, strict=True)], ...] = Field(
        (), description="Layers that are dense in any case, by index."
    )
    router_trains: bool = Field(True, description="Updates change the routers of experts.")
    frozen: tuple[PartName, ...] = Field((), description="Parts of a model that sees that updates do not change.")
    value_head: bool = Field(False, description="The model is a critic: its head gives one number for each token.")
    vision: VisionConfig | None = Field(None, description="The tower and tokens of a model that sees.")
    adapter: Adapter | None = Field(None, description="Low-rank adapters, which train in place of the weights.")
    initializer_range: Float32 = Field(0.02, gt=0.0, description="Standard deviation of random initial weights.")
    eos_token_ids: tuple[TokenId, ...] = Field((), description="Tokens that end a response.")
    pad_token_id: TokenId | None = Field(None, description="Token that fills up rows; carries no weight anywhere.")
    bos_token_id: TokenId | None = Field(None, description="Token that begins a text, where the model has one.")

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Compute absent num_kv_heads and head_dim from the other sizes."""
        heads = values.get("num_heads")
        hidden = values.get("hidden_size")
        derived = {"num_kv_heads": heads}
        if "head_dim" not in values and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            if hidden % heads:
                found = f"hidden_size {hidden} is not a multiple of num_heads {heads}"
                raise ValueError(f"{found}; set hidden_size to a multiple of {heads}, or give head_dim")
            derived["head_dim"] = hidden // heads
        return derived | values

    @model_validator(mode="after")
    def _divisible(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd, and the rotary embedding needs pairs")
        return self

    @model_validator(mode="after")
    def _with_experts(self):
        if FAMILIES[self.family].experts != (self.num_experts > 0):
            has = "some" if self.num_experts == 0 else "none"
            raise ValueError(f"num_experts is {self.num_experts}, and a model of the family {self.family} has {has}")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            found = f"num_experts_per_tok is {self.num_experts_per_tok}"
            raise ValueError(f"{found}; set it to a number from 1 to num_experts {self.num_experts}")
        if self.num_experts and self.moe_intermediate_size == 0:
            raise ValueError("moe_intermediate_size is 0; set it to the width of one expert")
        return self

    @model_validator(mode="after")
    def _with_vision(self):
        if FAMILIES[self.family].sees != (self.vision is not None):
            has = "a vision tower" if self.vision is None else "none"
            raise ValueError(f"vision is {brief(self.vision)}, and a model of the family {self.family} has {has}")
        if self.vision and 2 * sum(self.vision.sections) != self.head_dim:
            found = f"the rotary sections {list(self.vision.sections)} are {sum(self.vision.sections)} pairs"
            raise ValueError(f"{found}, and heads of {self.head_dim} have {self.head_dim // 2}")
        return self

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts (`Qwen2MoeDecoderLayer`'s rule)."""
        every = range(self.decoder_sparse_step - 1, self.num_layers, self.decoder_sparse_step)
        return tuple(layer for layer in every if layer not in self.mlp_only_layers) if self.num_experts else ()

    @property
    def inner_widths(self) -> dict[str, int]:
        """Widths of the feed-forward halves that the model has, by field."""
        widths = {}
        if len(self.expert_layers) < self.num_layers:
            widths["intermediate_size"] = self.intermediate_size
        if self.expert_layers:
            widths["moe_intermediate_size"] = self.moe_intermediate_size
        return widths

    @property
    def active_width(self) -> int:
        """Inner columns that compute one token, summed over all layers."""
        sparse = len(self.expert_layers)
        dense = self.num_layers - sparse
        return dense * self.intermediate_size + sparse * self.num_experts_per_tok * self.moe_intermediate_size

    def as_critic(self) -> "ModelConfig":
        """Return the same transformer with a value head in place of its own."""
        return self.model_copy(update={"value_head": True, "tie_word_embeddings": False, "adapter": None, "frozen": ()})

    def with_frozen(self, router: bool, parts: Sequence[PartName]) -> "ModelConfig":
        """Return the same model with a router and parts frozen or not."""
        return self.model_copy(update={"router_trains": not router, "frozen": tuple(parts)})

    @property
    def base(self) -> "ModelConfig":
        """Architecture without adapters and frozen parts."""
        return self.model_copy(update={"adapter": None, "frozen": ()})

    @property
    def text_trains(self) -> bool:
        """True if updates change the layers' own weights and the head."""
        return self.adapter is None and "text" not in self.frozen

    @property
    def dropout(self) -> float:
        """Share of the adapters' inputs that updates drop."""
        return self.adapter.dropout if self.adapter else 0.0

    @classmethod
    def from_hf(cls, raw: dict[str, Any], where: str, seeing: bool = False) -> "ModelConfig":
        """Read the content of an HF `config.json`; `where` names the file in messages.

        seeing: also read models with images, which some commands run.

        Both spellings of the rotary settings are read: `rope_theta` with `rope_scaling`, and `rope_parameters`.
        Keys that are absent or null take `transformers`' defaults. Raises UserError.
        """
        if not isinstance(raw, dict):
            raise UserError(f"{where}: the file must hold one JSON object, the model's configuration.")
        name = raw.get("model_type")
        if not isinstance(name, str) or name not in FAMILIES:
            raise unsupported(where, f"model_type is {brief(name)}")
        family = FAMILIES[name]
        if family.sees and not seeing:
            raise unsupported(where, f"model_type is {brief(name)}", WITH_IMAGES)
        raw = flattened(raw, where) if family.sees else raw
        _refuse_unsupported(raw, family, where)
        keys = _hf_keys(family)
        raw = _one_spelling(raw, where)
        given = {field: raw[key] for field, key in keys.items() if raw.get(key) is not None}
        rope_key, rope = _rope(raw, where)
        theta = rope.get("rope_theta", raw.get("rope_theta"))
        if family.sees and rope.get("type") == SECTIONED:
            rope = {"rope_type": NO_SCALING} | rope
        eos = given.get("eos_token_ids", [])
        values = {
            "attention_bias": family.attention_bias,
            **family.hf_defaults,
            **given,
            "family": name,
            "qk_norm": family.qk_norm,
            "rope_theta": 10000.0 if theta is None else theta,
            "rope_scaling": rope,
            "eos_token_ids": eos if isinstance(eos, list) else [eos],
        }
        if family.sees:
            values["vision"] = read_vision(raw, given.get("hidden_size"), where)
        if any(CRITIC in str(name) for name in _names(raw, "architectures", where)):
            values |= {"value_head": True, "tie_word_embeddings": False}
        written = {field: (key,) for field, key in keys.items()} | {"rope_scaling": (rope_key,)}
        return build(cls, values, Layer(values, {(): where}), written, strict=False)

    def to_hf(self) -> dict[str, Any]:
        """Build an HF `config.json`, which `from_hf` and `transformers` read back."""
        family = FAMILIES[self.family]
        keys = _hf_keys(family)
        eos = list(self.eos_token_ids)
        kind = CRITIC if self.value_head else family.hf_head
        return {
            "architectures": [f"{family.hf_class}For{kind}"],
            **({"num_labels": 1} if self.value_head else {}),
            "model_type": self.family,
            **{key: getattr(self, field) for field, key in keys.items() if field != "attention_bias"},
            **({"rope_scaling": self.rope_scaling.to_hf()} if self.rope_scaling else {}),
            **(self.vision.to_hf(self.hidden_size) if self.vision else {}),
            "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "use_cache": True,
            "torch_dtype": "float32",
            **family.hf_settings,
        }


def _hf_keys(family: Family) -> dict[str, str]:
    """Map fields to the keys of the family's `config.json`."""
    return HF_KEYS | (HF_EXPERT_KEYS if family.experts else {})


def _one_spelling(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Rename keys that `transformers` writes under two names to the first of them."""
    for other, key in HF_SPELLINGS.items():
        value = raw.get(other)
        if value is not None and raw.get(key) not in (None, value):
            raise UserError(f"{where}: {key} is {brief(raw[key])} and {other} is {brief(value)}; leave one out.")
        raw = raw if value is None else {**raw, key: value}
    return raw


def _rope(raw: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """Find the rotary settings and their key; empty when there are none."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key)
        if rope and not isinstance(rope, dict):
            raise UserError(f"{where}: {key} is {rope!r}, and must be an object or null.")
        if rope:
            return key, rope
    return "rope_scaling", {}


def _names(raw: dict[str, Any], key: str, where: str) -> list[Any]:
    """List the names under a key; none if it is absent or null."""
    names = raw.get(key)
    if names is not None and not isinstance(names, list):
        raise UserError(f"{where}: {key} is {brief(names)}, and must be a list of names.")
    return names or []


def _refuse_unsupported(raw: dict[str, Any], family: Family, where: str) -> None:
    """Raise UserError for settings of a model that this suite does not compute."""
    if raw.get("use_sliding_window") or "sliding_attention" in _names(raw, "layer_types", where):
        right = "set it to false, and every layer to full_attention"
        raise UserError(f"{where}: use_sliding_window true is not supported; {right}.")
    gate = family.hf_settings.get("hidden_act", "silu")
    if raw.get("hidden_act", gate) != gate:
        raise UserError(f"{where}: hidden_act is {raw['hidden_act']!r}, and must be {gate!r}.")
    for key in family.without:
        if raw.get(key):
            raise UserError(f"{where}: {key} true is not supported with {family.name}; take one without biases.")
