"""`model.model_config` of a MindFormers YAML: the architecture, and for predict YAMLs the sampling."""

from collections.abc import Mapping
from itertools import chain
from typing import Any, Literal

from pydantic import Field, create_model, model_validator

from mindrlhf.configs.base import Float32, Settings, optional
from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.configs.lora import PetSettings
from mindrlhf.configs.model import Llama3Scaling, ModelConfig, RotaryScaling
from mindrlhf.configs.model_names import SHAPE_FIELDS
from mindrlhf.configs.problems import build
from mindrlhf.configs.unsupported import CLASSES, MODEL_TYPES
from mindrlhf.configs.vision import TOWER_GROUP
from mindrlhf.configs.vision_settings import VisionSettings, tower_shape
from mindrlhf.configs.yaml_file import Layer
from mindrlhf.errors import UserError
from mindrlhf.models.families import DEFAULT, FAMILIES, LLAMA_CLASS, LLAMA_TYPE, Family

GROUP = "model.model_config"

DType = Literal["float32", "float16", "bfloat16"]

# Keys that a YAML without a checkpoint must give: MindFormers' defaults belong to another model.
NEEDED = ("vocab_size", "hidden_size", "num_layers", "num_heads", "rms_norm_eps", "theta")
NEEDED_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")

MULTIPLE_OF = 256  # LlamaConfig's default


# Key of a number of the model, or of its sampling -> our name; null if the YAML does not set it.
_MODEL = {key: name for key, name in SHAPE_FIELDS.items() if name != "rope_scaling"}
_MODEL |= {"max_position_embedding": "max_position_embeddings", "initializer_range": "initializer_range"}
_SAMPLING = {key: key for key in ("temperature", "top_k", "top_p", "repetition_penalty")}
_SAMPLING |= {"max_decode_length": "max_new_tokens", "min_decode_length": "min_new_tokens"}
SAMPLING_KEYS = (*_SAMPLING, "do_sample")


_NUMBERS = create_model(
    "Numbers",
    __base__=Settings,
    __doc__="Numbers of a model and of its sampling.",
    **{key: optional(ModelConfig.model_fields[name]) for key, name in _MODEL.items()},
    **{key: optional(SamplingSettings.model_fields[name]) for key, name in _SAMPLING.items()},
)


class ModelSettings(_NUMBERS):
    """`model.model_config` under MindFormers' names; null if the YAML does not set it."""

    type: Literal[CLASSES] | None = Field(None, description="MindFormers' configuration class.")
    model_type: Literal[MODEL_TYPES] | None = Field(None, description="HF's name of the model family.")
    multiple_of: int | None = Field(
        None, ge=1, description="Without intermediate_size: the feed-forward width is rounded up to a multiple of this."
    )
    ffn_dim_multiplier: Float32 | None = Field(
        None, gt=0.0, description="Without intermediate_size: factor of the feed-forward width."
    )
    extend_method: Literal["None", "LLAMA3"] | None = Field(None, description="Scaling of the rotary frequencies.")
    scaling_factor: RotaryScaling = Field(None, description="Numbers of Llama 3's scaling; a bare one has no effect.")
    eos_token_id: int | tuple[int, ...] | None = Field(None, description="Token or tokens that end a response.")
    pad_token_id: int | None = Field(None, description="Token that fills up rows.")
    bos_token_id: int | None = Field(None, description="Token that begins a text.")
    seq_length: int | None = Field(None, ge=1, description="Longest prompt and response together, in tokens.")
    offset: int | tuple[int, ...] = Field(0, description="Layers more or fewer than the even share, by pipeline stage.")
    compute_dtype: Literal[DType, "auto"] = Field(
        "float32", description="Dtype of what matrix products take; auto: bfloat16 where it is fast."
    )
    param_init_type: DType = Field("float32", description="Dtype of weights (LlamaConfig's default is float16).")
    layernorm_compute_type: DType = Field("float32", description="Dtype of RMSNorm.")
    softmax_compute_type: DType = Field("float32", description="Dtype of the attention's softmax.")
    vision_config: VisionSettings | None = Field(
        None, description="Vision tower under HF's names, and the text's rotary sections, of a model that sees."
    )
    pet_config: PetSettings | None = Field(None, description="Low-rank adapters: settings of lora.")
    do_sample: bool | None = Field(None, description="False draws the most probable token: temperature 0.")

    @model_validator(mode="after")
    def _scaled(self):
        if (self.extend_method == "LLAMA3") != (self.scaling_factor is not None) and self.extend_method:
            numbers = ", ".join(Llama3Scaling.model_fields)
            raise ValueError(f"extend_method LLAMA3 and a scaling_factor with {numbers} belong together; give both")
        return self

    @property
    def stated_family(self) -> Family | None:
        """Model family that the YAML states, or None.

        Experts, a tower, a type or q/k norms state it.
        """
        families = FAMILIES.values()
        named = {self.model_type, self.type}
        experts = (one for one in families if one.experts and (self.num_experts or named & {one.name, one.mindformers}))
        towers = (one for one in families if one.sees and self.vision_config)
        norms = (one for one in families if self.qk_norm and one.qk_norm and not one.experts)
        classes = (one for one in families if self.type and self.type == one.mindformers)
        names = (one for one in families if self.model_type == one.name != LLAMA_TYPE)
        return next(chain(experts, towers, norms, classes, names), None)

    @property
    def family(self) -> Family | None:
        """Model family without a checkpoint; for the class `LlamaConfig` biases decide."""
        biases = bool(self.qkv_has_bias)
        if self.stated_family or not (biases or self.type == LLAMA_CLASS or self.model_type == LLAMA_TYPE):
            return self.stated_family
        return next((one for one in FAMILIES.values() if one.as_llama and one.attention_bias == biases), None)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        ids = self.eos_token_id
        return (ids,) if isinstance(ids, int) else ids or ()

    def feed_forward_width(self, hidden_size: int) -> int:
        """Return intermediate_size, or compute it by MindFormers' rule (`LlamaFeedForward`).

        4 * hidden, times (ffn_dim_multiplier + 0.01) if given, cut to two thirds, rounded up to multiple_of.
        """
        if self.intermediate_size is not None:
            return self.intermediate_size
        factor = 1.0 if self.ffn_dim_multiplier is None else self.ffn_dim_multiplier + 0.01
        step = self.multiple_of or MULTIPLE_OF
        return -(-int(2 * int(factor * (4 * hidden_size)) / 3) // step) * step

    def architecture(self, hf: ModelConfig | None, where: str, hf_where: str = "config.json") -> ModelConfig:
        """Combine this YAML with a checkpoint's configuration (`hf`), if there is one.

        where, hf_where: the two files' names in messages.
        Shape numbers in the YAML must equal the checkpoint's. Token ids and the range of initial weights come from the
        YAML if it sets them; the smaller one of the two maximum lengths holds.
        Raises UserError for a disagreement, and without `hf` for a key that is missing.
        """
        return self._alone(where) if hf is None else self._beside(hf, where, hf_where)

    def _beside(self, hf: ModelConfig, where: str, hf_where: str) -> ModelConfig:
        declared = _set({key: getattr(self, key) for key in SHAPE_FIELDS})
        if self.multiple_of is not None or self.ffn_dim_multiplier is not None:
            declared["intermediate_size"] = self.feed_forward_width(hf.hidden_size)
        if self.vision_config:
            declared |= {f"{TOWER_GROUP}.{key}": value for key, value in _set(dict(self.vision_config)).items()}
        theirs = shape(hf)
        if self.stated_family:
            declared["model family"] = self.stated_family.name
            theirs["model family"] = hf.family
        found = differences(declared, theirs, "the checkpoint")
        if found:
            right = "set these keys to the checkpoint's values, or remove them"
            raise UserError(f"{where}: {GROUP} is not that of the checkpoint ({hf_where}): {found}; {right}.")
        changes: dict[str, Any] = self._tokens_and_range()
        if self.max_position_embedding is not None:
            changes["max_position_embeddings"] = min(self.max_position_embedding, hf.max_position_embeddings)
        return hf.model_copy(update=changes)

    def _alone(self, where: str) -> ModelConfig:
        family = self.family or DEFAULT
        of_family = (*NEEDED_OF_EXPERTS, "head_dim") if family.experts else {"head_dim"} & family.hf_defaults.keys()
        needed = (*NEEDED, *(["type"] if self.family is None else []), *of_family)
        missing = [key for key in needed if getattr(self, key) is None]
        if family.sees:
            missing += [TOWER_GROUP] if self.vision_config is None else self.vision_config.missing()
        if missing:
            right = "add what is missing, or give a checkpoint whose config.json says it"
            raise UserError(f"{where}: {GROUP} lacks {', '.join(missing)}; {right}.")
        for key, right in (("qkv_has_bias", family.attention_bias), ("qk_norm", family.qk_norm)):
            if getattr(self, key) not in (None, right):
                raise UserError(f"{where}: {GROUP}.{key} is {not right}, and a {family.name} model has {right}.")
        given = {field: getattr(self, key) for key, field in SHAPE_FIELDS.items()}
        given |= {
            "family": family.name,
            "intermediate_size": self.feed_forward_width(self.hidden_size),
            "attention_bias": family.attention_bias,
            "qk_norm": family.qk_norm,
            "max_position_embeddings": self.max_position_embedding or self.seq_length,
        }
        if family.sees:
            given["vision"] = self.vision_config.tower(f"{where}: {GROUP}")
        values = _set(given) | self._tokens_and_range()
        return build(ModelConfig, values, Layer(values, {(): f"{where}: {GROUP}"}), strict=False)

    def _tokens_and_range(self) -> dict[str, Any]:
        """Collect the fields of ModelConfig that a YAML may set alongside any checkpoint."""
        names = ("pad_token_id", "bos_token_id", "initializer_range")
        return _set({"eos_token_ids": self.eos_token_ids or None} | {name: getattr(self, name) for name in names})

    def sampling(self) -> dict[str, Any]:
        given = {name: getattr(self, key) for key, name in _SAMPLING.items()}
        return _set(given | ({"temperature": 0.0} if self.do_sample is False else {}))


def shape(model: ModelConfig) -> dict[str, Any]:
    """List the numbers that descriptions of one model share, by YAML key."""
    numbers = {key: getattr(model, field) for key, field in SHAPE_FIELDS.items()}
    return numbers | tower_shape(model.vision)


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], other: str) -> str:
    """List common keys whose values differ; `other` names the side of `theirs`."""
    pairs = [(key, value, theirs[key]) for key, value in ours.items() if key in theirs and value != theirs[key]]
    return ", ".join(f"{key} is {value} ({other} has {right})" for key, value, right in pairs)


def _set(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}
