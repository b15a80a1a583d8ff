"""Typed settings of a GRPO run (`--grpo_config FILE.yaml` and `group.key=value` on the command line).

A description that ends in (verl ..., TRL ...) names the same setting in those suites.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from mindrlhf.configs.algorithm import AlgorithmSettings, DynamicSamplingSettings, RolloutCorrectionSettings
from mindrlhf.configs.base import Settings


class DataSettings(Settings):
    """Which prompts a step takes."""

    prompts_per_step: int = Field(
        8, ge=1, description="Prompts of one step over all data-parallel ranks (verl data.train_batch_size)."
    )
    shuffle: bool = Field(True, description="Draw prompts in a new order each epoch (verl data.shuffle).")


class SamplingSettings(Settings):
    """How one token is drawn; shared by rollouts, evaluation and `mindrlhf generate`."""

    max_new_tokens: int = Field(
        256, ge=1, description="Most tokens of a response (verl data.max_response_length, TRL max_completion_length)."
    )
    min_new_tokens: int = Field(0, ge=0, description="Stop tokens cannot be drawn before this many tokens.")
    temperature: float = Field(1.0, ge=0.0, description="Logits are divided by it; 0 is greedy.")
    top_k: int = Field(0, ge=0, description="Draw from the k most probable tokens only; 0 is off (verl: -1 is off).")
    top_p: float = Field(
        1.0, gt=0.0, le=1.0, description="Draw from the fewest tokens whose probability sums to p; 1 is off."
    )
    min_p: float = Field(
        0.0, ge=0.0, lt=1.0, description="Drop tokens below this share of the best one's probability; 0 is off."
    )
    repetition_penalty: float = Field(
        1.0,
        gt=0.0,
        description="Logits of tokens already seen are divided (positive) or multiplied by it; 1 is off.",
    )
    stop_strings: tuple[str, ...] = Field((), description="A response ends when one of these texts appears in it.")


class RolloutSettings(SamplingSettings):
    """How responses are generated for training."""

    num_generations: int = Field(
        8, ge=1, description="Responses per prompt (verl actor_rollout_ref.rollout.n, TRL num_generations)."
    )
    max_slots: int = Field(
        64, ge=1, description="Sequences decoded at once on one data-parallel rank (verl rollout.max_num_seqs)."
    )
    verify_weights: bool = Field(
        False, description="Compare checksums of the weights that generate with the trained ones after each reshard."
    )


class OptimizerSettings(Settings):
    """AdamW, its learning-rate schedule and gradient clipping."""

    lr: float = Field(1e-6, ge=0.0, description="Learning rate after warm-up (verl actor.optim.lr, TRL learning_rate).")
    min_lr: float = Field(0.0, ge=0.0, description="Learning rate at the end of the decay.")
    warmup_steps: int = Field(
        0, ge=0, description="Optimizer updates of linear warm-up from 0 (verl actor.optim.lr_warmup_steps)."
    )
    lr_decay: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Shape of the decay from lr to min_lr (verl actor.optim.warmup_style)."
    )
    beta1: float = Field(0.9, ge=0.0, lt=1.0, description="AdamW's decay of the first moment (TRL adam_beta1).")
    beta2: float = Field(0.95, ge=0.0, lt=1.0, description="AdamW's decay of the second moment (TRL adam_beta2).")
    eps: float = Field(1e-8, gt=0.0, description="AdamW's epsilon (TRL adam_epsilon).")
    weight_decay: float = Field(
        0.01,
        ge=0.0,
        description="Weight decay of matrices, not of biases, norms and embeddings (verl actor.optim.weight_decay).",
    )
    max_grad_norm: float = Field(
        1.0, ge=0.0, description="Gradients are scaled down to this global norm (verl actor.grad_clip); 0 is off."
    )


class CriticSettings(Settings):
    """The critic of PPO, which exists with `algorithm.advantage: gae`: a second transformer with a value head."""

    optimizer: OptimizerSettings = Field(
        OptimizerSettings(lr=1e-5),
        description="AdamW of the critic, its schedule and gradient clipping (verl critic.optim, critic.grad_clip).",
    )
    value_clip: float | None = Field(
        0.5,
        gt=0.0,
        description="A value's loss counts as if it had moved by at most this much in one step; null is off "
        "(verl critic.cliprange_value).",
    )
    warmup_steps: int = Field(
        0, ge=0, description="First steps in which the critic alone is trained (verl trainer.critic_warmup)."
    )


class TrainSettings(Settings):
    """How an update is cut into pieces that fit."""

    max_tokens_per_micro_batch: int = Field(
        16384,
        ge=1,
        description="Padded tokens of a micro-batch, a shared prompt once (verl actor.ppo_max_token_len_per_gpu).",
    )
    length_bucket: int = Field(
        32, ge=1, description="Lengths are padded to a multiple of this many tokens, so that few graphs compile."
    )


class MemorySettings(Settings):
    """What is in memory when."""

    swap: bool = Field(
        False,
        description="Put away what a phase does not need: weights, moments, gradients, cache "
        "(verl actor.fsdp_config.param_offload and optimizer_offload).",
    )
    swap_dir: Path | None = Field(
        None, description="On CPU, where what is put away goes; null is <output>/swap. A local disk with room."
    )


class RewardFunctionSettings(Settings):
    """One reward function."""

    name: str = Field(description="A shipped function, `package.module:function`, or `path/file.py:function`.")
    weight: float = Field(1.0, description="Factor in the sum over reward functions (TRL reward_weights).")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments handed to the function.")


class RewardSettings(Settings):
    """What scores a response."""

    functions: tuple[RewardFunctionSettings, ...] = Field(
        (RewardFunctionSettings(name="gsm8k"),), description="The reward is the weighted sum of these functions."
    )
    overlong_factor: float = Field(
        0.0,
        ge=0.0,
        description="Largest soft overlong punishment, DAPO's; 0 is off "
        "(verl reward_model.overlong_buffer.enable, .penalty_factor).",
    )
    overlong_buffer: int | None = Field(
        None,
        ge=1,
        description="Tokens before rollout.max_new_tokens over which the punishment grows; null is a fifth of all "
        "(verl reward_model.overlong_buffer.len).",
    )
    timeout_s: float = Field(10.0, gt=0.0, description="Seconds that scoring one response may take.")
    workers: int = Field(1, ge=1, description="Reward processes on each rank.")

    @property
    def all_functions(self) -> tuple[RewardFunctionSettings, ...]:
        """The functions to call: those named, and the overlong punishment where it is on."""
        if not self.overlong_factor:
            return self.functions
        args = {} if self.overlong_buffer is None else {"buffer": self.overlong_buffer}
        return (*self.functions, RewardFunctionSettings(name="soft_overlong", weight=self.overlong_factor, args=args))


class TrainerSettings(Settings):
    """How long to run and what to write."""

    total_steps: int | None = Field(
        None,
        ge=1,
        description="Steps of the run; null is epochs x (rows / prompts_per_step) (verl trainer.total_training_steps).",
    )
    epochs: int = Field(
        1, ge=1, description="Passes over the prompts when total_steps is not given (verl trainer.total_epochs)."
    )
    save_rollouts: bool = Field(
        False, description="Write each step's prompts, answers and rewards as JSONL to <output>/rollouts."
    )
    tensorboard: bool = Field(True, description="Write TensorBoard events.")
    progress: bool = Field(True, description="Show progress bars on a terminal.")


class GRPOConfig(Settings):
    """All settings of a GRPO run."""

    seed: int = Field(0, ge=0, description="Seed of everything random in the run.")
    data: DataSettings = Field(DataSettings(), description="Which prompts a step takes.")
    rollout: RolloutSettings = Field(RolloutSettings(), description="How responses are generated.")
    dynamic_sampling: DynamicSamplingSettings = Field(
        DynamicSamplingSettings(), description="Which groups a step trains on."
    )
    algorithm: AlgorithmSettings = Field(AlgorithmSettings(), description="Advantage, loss and KL.")
    rollout_correction: RolloutCorrectionSettings = Field(
        RolloutCorrectionSettings(), description="Importance weights for the engine's distribution."
    )
    optimizer: OptimizerSettings = Field(OptimizerSettings(), description="AdamW, its schedule and gradient clipping.")
    critic: CriticSettings = Field(CriticSettings(), description="The critic of PPO.")
    train: TrainSettings = Field(TrainSettings(), description="How an update is cut into micro-batches.")
    memory: MemorySettings = Field(MemorySettings(), description="What is in memory when.")
    reward: RewardSettings = Field(RewardSettings(), description="What scores a response.")
    trainer: TrainerSettings = Field(TrainerSettings(), description="How long to run and what to write.")
