"""Typed settings of a GRPO run (`--grpo_config FILE.yaml`, `group.key=value`).

A description that ends in (verl ..., TRL ...) names the same setting in those suites.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from mindrlhf.configs.algorithm import AlgorithmSettings, DynamicSamplingSettings, RolloutCorrectionSettings
from mindrlhf.configs.base import Float32, Settings
from mindrlhf.configs.lora import LoraSettings
from mindrlhf.configs.reward_models import with_model_args
from mindrlhf.configs.run import RunSettings
from mindrlhf.configs.vision import PartName
from mindrlhf.data.truncation import TRUNCATIONS
from mindrlhf.optimizer_state import State

Seed = Annotated[int, Field(ge=0, le=2**62)]  # int64 also holds the sum of the seed and validation's offset
Texts = tuple[Annotated[str, Field(min_length=1)], ...]


class DataSettings(Settings):
    """Selection of a step's prompts."""

    prompts_per_step: int = Field(8, ge=1)
    """Prompts of one step over all data-parallel ranks (verl data.train_batch_size)."""
    shuffle: bool = True
    """Draw prompts in a new order each epoch (verl data.shuffle, TRL shuffle_dataset)."""
    val_dataset: str | None = None
    """Held-out problems, in a form of --mind_dataset_dir; null measures no accuracy (verl data.val_files)."""
    template: str | None = None
    """Prompt template for rows outside a MindRecord, as --template of `mindrlhf data`."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Longest prompt of such rows, in tokens; null keeps all (verl data.max_prompt_length, TRL max_prompt_length)."""
    truncation: Literal[TRUNCATIONS] = "left"
    """Treatment of longer prompts: left cuts the beginning, right the end, drop leaves the row out, error refuses it
    (verl data.truncation, data.filter_overlong_prompts)."""
    fields: Texts = ()
    """Other names of such rows' columns, as --fields of `mindrlhf data`: prompt=messages (verl data.prompt_key)."""
    chat_template_kwargs: dict[str, Any] = {}
    """Additional variables of the chat template for such rows and conversations; `chat_template` chooses one by name
    (TRL chat_template_kwargs)."""


class SamplingSettings(Settings):
    """Token sampling in rollouts, evaluation and `mindrlhf generate`."""

    max_new_tokens: int = Field(256, ge=1)
    """Maximum tokens of a response (verl data.max_response_length, TRL max_completion_length)."""
    min_new_tokens: int = Field(0, ge=0)
    """Stop tokens cannot be drawn before this many tokens of a response."""
    temperature: Float32 = Field(1.0, ge=0.0)
    """Logits are divided by it; 0 is greedy (TRL temperature)."""
    top_k: int = Field(0, ge=0)
    """Draw from the k most probable tokens only; 0 is off, which is -1 in verl (TRL top_k)."""
    top_p: Float32 = Field(1.0, gt=0.0, le=1.0)
    """Draw from the fewest tokens whose probability sums to p; 1 is off (TRL top_p)."""
    min_p: Float32 = Field(0.0, ge=0.0, lt=1.0)
    """Drop tokens below this share of the best one's probability; 0 is off (TRL min_p)."""
    repetition_penalty: Float32 = Field(1.0, gt=0.0)
    """Logits of tokens already seen are divided (positive) or multiplied by it; 1 is off (TRL repetition_penalty)."""
    stop_strings: Texts = ()
    """A response ends when one of these texts appears in it."""
    speculation: bool = True
    """While few responses are left, verify drafts of the next tokens taken from other answers to the prompt; the
    generated tokens stay the same (n-gram speculation)."""


class RolloutSettings(SamplingSettings):
    """Generation of responses for training."""

    num_generations: int = Field(8, ge=1)
    """Responses per prompt (verl actor_rollout_ref.rollout.n, TRL num_generations)."""
    max_slots: int = Field(64, ge=1)
    """Sequences decoded at once on one data-parallel rank (verl rollout.max_num_seqs)."""
    tokens_per_step: int | None = Field(None, ge=1)
    """With trainer.staleness: tokens of a step, in equal shares for all unfinished answers of it and of the next steps;
    its own go on to their ends, the others in the next step. null draws an answer in one step (verl has partial_rollout
    for it)."""
    weights: Literal["train", "bfloat16", "int8"] = "train"
    """Weights used by decode steps: the trained ones, or copies packed after each update, on CPU only. int8 has one
    scale for each 64 numbers of a row."""
    verify_weights: bool = False
    """Compare checksums of the generating and the trained weights after each reshard."""
    routing_replay: Literal["off", "old", "rollout"] = "off"
    """Experts that compute tokens in updates: those that the routers choose then, those of the policy's pass before the
    step's updates, or those that generation chose (verl actor.router_replay.mode disabled, R2, R3)."""
    environment: str | dict[str, str] | None = None
    """Environment of each conversation: `file.py:Class` or a ready one. Of several by name, each row chooses one with
    its field `environment` (TRL environment_factory)."""
    tools: Texts = ()
    """Functions that the policy may call, `file.py:function` or ready ones (TRL tools); `none` answers each call with
    an error."""
    tool_format: str = "hermes"
    """Format of tool calls: hermes, retool, python_block, or `file.py:Class`."""
    max_turns: int = Field(8, ge=1)
    """Maximum turns of the policy in a conversation (TRL max_tool_calling_iterations + 1)."""
    tool_timeout_s: float = Field(10.0, gt=0.0)
    """Seconds that a call of a tool or an environment may take."""
    tool_workers: int = Field(64, ge=1, le=1024)
    """Concurrent calls on each rank that scores; tools that wait, for example for a network, can all wait at once."""
    tool_memory_mb: int = Field(1024, ge=1)
    """Memory limit of a conversation's process, in MiB, on top of its memory at the start."""
    tool_images: bool = False
    """Tools and environments of a model that sees may answer with images; each token is then a step of its own."""
    sandbox: Literal["required", "best_effort"] = "required"
    """Where code that a model writes for the tool `python` runs: only where Linux's kernel holds it, or anywhere."""

    @field_validator("routing_replay", mode="before")
    @classmethod
    def _of_switch(cls, given: Any) -> Any:
        return "off" if given is False else given  # YAML reads off as a truth value

    @property
    def records_routing(self) -> bool:
        """True if generation records the routing that training replays."""
        return self.routing_replay == "rollout"

    @property
    def converses(self) -> bool:
        """True for conversations of several turns."""
        return bool(self.environment or self.tools)


class AccuracySettings(SamplingSettings):
    """Generation and scoring for held-out problems."""

    temperature: Float32 = Field(0.0, ge=0.0)
    """Logits are divided by it; 0 is greedy (verl rollout.val_kwargs.temperature)."""
    num_generations: int = Field(1, ge=1)
    """Answers to each problem, for pass@k and maj@k (verl rollout.val_kwargs.n)."""
    limit: int | None = Field(None, ge=1)
    """Take only this many problems, from the first; null takes all (verl data.val_max_samples)."""
    reward: str | None = None
    """Reward function that gives 1 to a right answer; null is the function of the dataset's task."""


class ValidationSettings(AccuracySettings):
    """Generation and scoring for held-out problems (`data.val_dataset`)."""

    max_new_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of an answer; null is rollout.max_new_tokens (TRL max_completion_length)."""
    reward: str | None = None
    """Reward function that gives 1 to a right answer; null is that of the dataset's task, all is the functions of
    reward."""
    stop_strings: Texts | None = None
    """An answer ends when one of these texts appears in it; null is rollout.stop_strings."""
    environment: bool = True
    """Give answers the environment and the tools of rollout, if there are any."""

    def completed(self, rollout: RolloutSettings) -> "ValidationSettings":
        """Fill in rollout settings for absent values."""
        inherited = ("max_new_tokens", "stop_strings")
        return self.model_copy(update={key: getattr(rollout, key) for key in inherited if getattr(self, key) is None})


class OptimizerSettings(Settings):
    """AdamW, its learning-rate schedule and gradient clipping."""

    lr: Float32 = Field(1e-6, ge=0.0)
    """Learning rate after warm-up (verl actor.optim.lr, TRL learning_rate)."""
    min_lr: Float32 = Field(0.0, ge=0.0)
    """Learning rate at the end of the decay."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer updates of linear warm-up from 0 (verl actor.optim.lr_warmup_steps)."""
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay from lr to min_lr (verl actor.optim.warmup_style)."""
    beta1: Float32 = Field(0.9, ge=0.0, lt=1.0)
    """AdamW's decay of the first moment (TRL adam_beta1)."""
    beta2: Float32 = Field(0.95, ge=0.0, lt=1.0)
    """AdamW's decay of the second moment (TRL adam_beta2)."""
    eps: Float32 = Field(1e-8, gt=0.0)
    """AdamW's epsilon (TRL adam_epsilon)."""
    weight_decay: Float32 = Field(0.01, ge=0.0)
    """Weight decay of matrices, not of biases, norms and embeddings (verl actor.optim.weight_decay, TRL
    weight_decay)."""
    max_grad_norm: Float32 = Field(1.0, ge=0.0)
    """Gradients are scaled down to this global norm; 0 is off (verl actor.grad_clip, TRL max_grad_norm)."""
    state: State = "float32"
    """Numbers of AdamW's moments: float32 (8 bytes a parameter for both), bfloat16 (4) or int8 (2.06: 8-bit codes with
    a scale for each 128), rounded stochastically; those of vectors are float32 (TRL optim adamw_8bit)."""


class CriticSettings(Settings):
    """PPO's critic, for `algorithm.advantage: gae`: a second transformer with a value head."""

    optimizer: OptimizerSettings = OptimizerSettings(lr=1e-5)
    """AdamW of the critic, its schedule and gradient clipping (verl critic.optim, critic.grad_clip)."""
    value_clip: Float32 | None = Field(0.5, gt=0.0)
    """In the loss, a value counts as moved by at most this much in one step; null is off (verl
    critic.cliprange_value)."""
    warmup_steps: int = Field(0, ge=0)
    """Number of first steps that train only the critic (verl trainer.critic_warmup)."""


class TrainSettings(Settings):
    """Division of an update into pieces that fit into memory."""

    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Maximum padded tokens of a micro-batch; a shared prompt counts once (verl actor.ppo_max_token_len_per_gpu)."""
    length_bucket: int = Field(32, ge=1)
    """Lengths are padded to a multiple of this many tokens, so that few graphs compile."""
    load_balancing_coef: Float32 = Field(0.0, ge=0.0)
    """Weight of the load-balancing loss of experts, of the router's probabilities in a micro-batch (TRL
    router_aux_loss_coef, Megatron moe_aux_loss_coeff)."""
    freeze_router: bool = False
    """Do not change the routers of experts in updates."""
    freeze: tuple[PartName, ...] = ()
    """Parts of a model that sees that updates do not change: vision is the tower, merger what joins it to the text,
    text everything else (verl actor.freeze_vision_tower is [vision, merger])."""
    tower_cache_gb: Float32 = Field(1.0, ge=0.0)
    """Host memory in GiB of one process for the images' rows of a vision tower that does not train, so that it computes
    each image once; the least recently used go first, and 0 keeps none."""


class MemorySettings(Settings):
    """Memory by phase of a step."""

    swap: bool = False
    """Swap out the data that a phase does not need: weights, moments, gradients, cache (verl
    actor.fsdp_config.param_offload and optimizer_offload)."""
    swap_dir: Path | None = None
    """Folder of the swapped-out data on CPU; null is <output>/swap. Use a local disk with enough room."""


class RewardFunctionSettings(Settings):
    """Reward function with its arguments and weight; a name alone stands for both defaults."""

    name: str
    """A shipped function, `package.module:function`, or `path/file.py:function`; or `model` or `judge`, a model whose
    settings, beginning with its path, stand beside the name."""
    weight: Float32 = 1.0
    """Factor in the sum over reward functions (TRL reward_weights)."""
    args: dict[str, Any] = {}
    """Keyword arguments handed to the function."""

    @model_validator(mode="before")
    @classmethod
    def _of_name(cls, given: Any) -> Any:
        if isinstance(given, int | float | list | None):
            raise ValueError(f"{given!r} is no function; give a name, or a group like {{name: format, weight: 0.5}}")
        named = {"name": given} if isinstance(given, str) else given
        return with_model_args(named) if isinstance(named, Mapping) else named


class RewardSettings(Settings):
    """Scoring of responses."""

    functions: tuple[RewardFunctionSettings, ...] = Field((RewardFunctionSettings(name="gsm8k"),), min_length=1)
    """The reward is the weighted sum of these functions."""
    overlong_factor: Float32 = Field(0.0, ge=0.0)
    """Largest soft overlong punishment, DAPO's; 0 is off (verl reward_model.overlong_buffer.enable,
    .penalty_factor)."""
    overlong_buffer: int | None = Field(None, ge=1)
    """Tokens before rollout.max_new_tokens over which the punishment grows; null is a fifth of rollout.max_new_tokens
    (verl reward_model.overlong_buffer.len)."""
    timeout_s: float = Field(10.0, gt=0.0)
    """Seconds that one call of a function may take, for one response or for all responses of a step."""
    workers: int = Field(1, ge=1, le=1024)
    """Reward processes on each rank."""

    @field_validator("functions", mode="before")
    @classmethod
    def _of_one(cls, given: Any) -> Any:
        if isinstance(given, int | float | None):
            raise ValueError(f"{given!r} is no function; give a name, or a list of names and groups")
        every = [given] if isinstance(given, str | Mapping) else given
        return tuple(every) if isinstance(every, list) else every

    @property
    def all_functions(self) -> tuple[RewardFunctionSettings, ...]:
        """Functions to call: the named ones, and the overlong punishment if switched on."""
        if not self.overlong_factor:
            return self.functions
        args = {} if self.overlong_buffer is None else {"buffer": self.overlong_buffer}
        return (*self.functions, RewardFunctionSettings(name="soft_overlong", weight=self.overlong_factor, args=args))


class TrainerSettings(RunSettings):
    """Length of a run, its validation, checkpoints and outputs."""

    staleness: int = Field(0, ge=0)
    """Steps by which answers are older than the weights that train on them: step k trains on those drawn with the
    weights after step k - 1 - staleness, the first steps on those of the first weights. Above 0,
    rollout_correction.level is token if it is not given (TRL max_staleness)."""
    placement: Literal["colocated", "split"] = "colocated"
    """Where training and generation run: on the same ranks in turn, or split, generation on ranks behind those that
    train; --trainer_ranks and --generator_ranks divide them (verl has one_step_off for it)."""
    scoring_ranks: Literal["train", "infer"] = "train"
    """Which ranks of a split placement score answers with the reference and the teacher: those that train, or those
    that generate, each scoring what it drew. --scorer_ranks gives them ranks of their own."""
    save_rollouts: bool = False
    """Write each step's prompts, answers and rewards as JSONL to <output>/rollouts."""
    log_completions_every: int | None = Field(None, ge=1)
    """Steps between showing the best and the worst answer to a prompt on the console; null shows none (TRL
    log_completions)."""
    token_figures: int = Field(1, ge=0)
    """Number of prompts per step whose kept answers have advantage, ratio, entropy and clipping of each token: the
    prompts with the widest spread of rewards."""


@dataclass(frozen=True)
class HeldOut:
    """Settings for drawing and judging answers to held-out problems.

    source: dataset of the problems. max_slots: sequences decoded at once on one data-parallel rank.
    """

    source: str | None
    sampling: AccuracySettings
    reward: RewardSettings
    max_slots: int


class GRPOSettings(Settings):
    """All settings of a GRPO run."""

    kind: ClassVar[str] = "grpo"
    seed: Seed = 0
    """Seed of everything random in the run (TRL seed)."""
    data: DataSettings = DataSettings()
    rollout: RolloutSettings = RolloutSettings()
    validation: ValidationSettings = ValidationSettings()
    dynamic_sampling: DynamicSamplingSettings = DynamicSamplingSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    rollout_correction: RolloutCorrectionSettings = RolloutCorrectionSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    lora: LoraSettings = LoraSettings()
    critic: CriticSettings = CriticSettings()
    train: TrainSettings = TrainSettings()
    memory: MemorySettings = MemorySettings()
    reward: RewardSettings = RewardSettings()
    trainer: TrainerSettings = TrainerSettings()

    @property
    def held_out(self) -> HeldOut:
        """Settings of answers to `data.val_dataset`."""
        sampling = self.validation.completed(self.rollout)
        return HeldOut(self.data.val_dataset, sampling, self.reward, self.rollout.max_slots)
