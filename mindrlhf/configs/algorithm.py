"""Typed settings of the algorithm: advantage, loss, KL, correction of the rollout, dynamic sampling.

A setting whose default is null belongs to some methods only: null is the method's own value, and giving it to a method
that has no such option is refused (`validate_algorithm.py`).
"""

from typing import Any, Literal

from pydantic import Field

from mindrlhf.configs.base import Float32, Settings

# Setting -> the option that the methods in `algorithms/` know it by. Which of them take it, their signatures say.
ADVANTAGE_OPTIONS = {
    "advantage_std": "std",
    "advantage_eps": "eps",
    "leave_one_out": "leave_one_out",
    "normalize_functions": "per_function",
    "gamma": "gamma",
    "lam": "lam",
}
LOSS_OPTIONS = {
    "epsilon_low": "epsilon_low",
    "epsilon_high": "epsilon_high",
    "dual_clip": "dual_clip",
    "delta": "delta",
    "importance_level": "level",
    "cispo_cap": "cap",
    "tau_positive": "tau_positive",
    "tau_negative": "tau_negative",
    "clip_cov_ratio": "clip_cov_ratio",
    "clip_cov_lb": "clip_cov_lb",
    "clip_cov_ub": "clip_cov_ub",
    "kl_cov_ratio": "kl_cov_ratio",
    "ppo_kl_coef": "ppo_kl_coef",
}


class AlgorithmSettings(Settings):
    """Advantage, loss and KL."""

    advantage: str = Field("grpo", description="Advantage estimator (verl algorithm.adv_estimator).")
    advantage_std: Literal["group", "batch", "none"] | None = Field(
        None,
        description="Standard deviation that an advantage is divided by; null is the method's own, `group` for grpo "
        "(verl algorithm.norm_adv_by_std_in_grpo, TRL scale_rewards).",
    )
    advantage_eps: Float32 | None = Field(
        None, gt=0.0, description="Added to that standard deviation; null is 1e-6, verl's (TRL: 1e-4)."
    )
    leave_one_out: bool | None = Field(
        None, description="Compare a response with the others of its group, without itself; null is the method's own."
    )
    normalize_functions: bool | None = Field(
        None,
        description="Normalise each reward function in its group before the weighted sum, GDPO; null is off "
        "(verl algorithm.adv_estimator=gdpo, TRL multi_objective_aggregation=normalize_then_sum).",
    )
    gamma: Float32 | None = Field(
        None, ge=0.0, le=1.0, description="Discount of later rewards; null is 1 (verl algorithm.gamma)."
    )
    lam: Float32 | None = Field(
        None,
        ge=0.0,
        le=1.0,
        description="Lambda of gae, the generalised estimates; null is 0.95 (verl algorithm.lam).",
    )
    policy_loss: str = Field("clip", description="Policy loss (verl actor.policy_loss.loss_mode, TRL loss_type).")
    epsilon_low: Float32 | None = Field(
        None,
        ge=0.0,
        description="The ratio is clipped at 1 - epsilon_low; null is the loss's own, 0.2 for clip "
        "(verl actor.clip_ratio_low, TRL epsilon).",
    )
    epsilon_high: Float32 | None = Field(
        None,
        ge=0.0,
        description="The ratio is clipped at 1 + epsilon_high; null is the loss's own, 0.2 for clip "
        "(verl actor.clip_ratio_high, TRL epsilon_high).",
    )
    dual_clip: Float32 | None = Field(
        None,
        gt=1.0,
        description="Bounds the loss of a negative advantage at this many times it; null is off "
        "(verl actor.clip_ratio_c, there always on with 3).",
    )
    delta: Float32 | None = Field(
        None,
        gt=1.0,
        description="Upper bound of the ratio for either sign of the advantage; null is off (TRL delta).",
    )
    importance_level: Literal["token", "sequence"] | None = Field(
        None,
        description="Ratio of the token, or the length-normalised one of its row (TRL importance_sampling_level).",
    )
    cispo_cap: Literal["relative", "absolute"] | None = Field(
        None,
        description="cispo: epsilon_high is `relative` to 1, or the `absolute` cap of the weight; null is relative "
        "(verl: relative, TRL: absolute).",
    )
    tau_positive: Float32 | None = Field(
        None,
        gt=0.0,
        description="sapo: temperature where the advantage is positive (verl actor.tau_pos, TRL sapo_temperature_pos).",
    )
    tau_negative: Float32 | None = Field(
        None, gt=0.0, description="sapo: temperature elsewhere (verl actor.tau_neg, TRL sapo_temperature_neg)."
    )
    clip_cov_ratio: Float32 | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="clip_cov: part of all tokens taken out of the gradient (verl actor.policy_loss.clip_cov_ratio).",
    )
    clip_cov_lb: Float32 | None = Field(
        None, description="clip_cov: covariance from which a token may be taken (verl actor.policy_loss.clip_cov_lb)."
    )
    clip_cov_ub: Float32 | None = Field(
        None, description="clip_cov: covariance up to which one may (verl actor.policy_loss.clip_cov_ub)."
    )
    kl_cov_ratio: Float32 | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="kl_cov: part of all tokens that gets the penalty (verl actor.policy_loss.kl_cov_ratio).",
    )
    ppo_kl_coef: Float32 | None = Field(
        None, ge=0.0, description="kl_cov: weight of the penalty; null is 1 (verl actor.policy_loss.ppo_kl_coef)."
    )
    aggregation: str = Field(
        "seq-mean-token-mean", description="How token losses become one number (verl actor.loss_agg_mode)."
    )
    aggregation_tokens: int | None = Field(
        None,
        ge=1,
        description="Constant that seq-mean-token-sum-norm and dr_grpo divide by; null is rollout.max_new_tokens "
        "(verl actor.loss_scale_factor).",
    )
    mask_truncated: bool = Field(
        False,
        description="Responses cut off at the token limit are not trained on (TRL mask_truncated_completions).",
    )
    entropy_coef: Float32 = Field(
        0.0,
        ge=0.0,
        description="Weight of the entropy, subtracted from the loss (verl actor.entropy_coeff, TRL entropy_coef).",
    )
    kl_estimator: str = Field(
        "k3",
        description="KL estimator against the reference model (verl actor.kl_loss_type, algorithm.kl_penalty).",
    )
    beta: Float32 = Field(
        0.01,
        ge=0.0,
        description="Weight of the KL term (verl actor.kl_loss_coef, TRL beta); 0 loads no reference model.",
    )
    kl_in_reward: bool = Field(
        False,
        description="Subtract the KL term from the reward of each token instead of adding it to the loss "
        "(verl algorithm.use_kl_in_reward).",
    )
    kl_target: Float32 | None = Field(
        None,
        gt=0.0,
        description="KL per token, in nats, that beta is steered to; null keeps beta fixed "
        "(verl algorithm.kl_ctrl.target_kl with type adaptive).",
    )
    kl_horizon: int = Field(
        10000,
        ge=1,
        description="With kl_target: responses over which beta may change by a fifth (verl algorithm.kl_ctrl.horizon).",
    )
    reference_sync_steps: int = Field(
        0,
        ge=0,
        description="Steps between two updates of the reference model from the policy; 0 is never "
        "(TRL sync_ref_model, ref_model_sync_steps).",
    )
    reference_sync_share: Float32 = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="Share of the policy in the reference model after such an update (TRL ref_model_mixup_alpha).",
    )
    num_iterations: int = Field(
        1, ge=1, description="Passes over a step's rollouts (verl actor.ppo_epochs, TRL num_iterations)."
    )
    updates_per_iteration: int = Field(
        1,
        ge=1,
        description="Optimizer updates of one pass (verl data.train_batch_size / actor.ppo_mini_batch_size).",
    )

    def advantage_options(self) -> dict[str, Any]:
        """Option -> value, of the advantage's settings that are given."""
        return self._given(ADVANTAGE_OPTIONS)

    def loss_options(self) -> dict[str, Any]:
        """Option -> value, of the policy loss's settings that are given."""
        return self._given(LOSS_OPTIONS)

    def _given(self, names: dict[str, str]) -> dict[str, Any]:
        return {option: getattr(self, name) for name, option in names.items() if getattr(self, name) is not None}

    @property
    def uses_critic(self) -> bool:
        """Whether the advantage needs values of a critic."""
        return self.advantage == "gae"

    @property
    def single_update(self) -> bool:
        """Whether a step's rollouts are used for one update, so that the policy that starts it is the one updated."""
        return self.num_iterations * self.updates_per_iteration == 1

    @property
    def scores_old_policy(self) -> bool:
        """Whether the log-probs of the policy that starts a step take a pass of their own, because the step's first
        update does not see all of its rollouts.
        """
        return self.updates_per_iteration > 1


class RolloutCorrectionSettings(Settings):
    """Importance weights for the difference between the distribution drawn from and the one that is trained."""

    level: Literal["token", "sequence"] | None = Field(
        None,
        description="Weight of each token, or the product over its row; null is no correction "
        "(verl algorithm.rollout_correction.rollout_is, TRL vllm_importance_sampling_correction).",
    )
    mode: Literal["truncate", "mask"] = Field(
        "truncate",
        description="Weights beyond the bounds are set to the bound, or to 0 (TRL vllm_importance_sampling_mode).",
    )
    upper: Float32 = Field(
        2.0,
        gt=0.0,
        description="Upper bound of the weight (verl algorithm.rollout_correction.rollout_is_threshold, "
        "TRL vllm_importance_sampling_cap).",
    )
    lower: Float32 = Field(
        0.0,
        ge=0.0,
        description="Lower bound of the weight (verl algorithm.rollout_correction.rollout_rs_threshold_lower).",
    )


class DynamicSamplingSettings(Settings):
    """DAPO's dynamic sampling: groups whose rewards do not differ are replaced by new ones."""

    enabled: bool = Field(
        False, description="Draw further prompts for groups without spread (verl algorithm.filter_groups.enable)."
    )
    max_rounds: int = Field(
        10,
        ge=1,
        description="Most rounds of generation for one step; then it trains on what there is "
        "(verl algorithm.filter_groups.max_num_gen_batches).",
    )
    prompts_per_round: int | None = Field(
        None, ge=1, description="Prompts of one round; null is data.prompts_per_step (verl data.gen_batch_size)."
    )
    metric: str | None = Field(
        None,
        description="Reward function whose scores have to differ in a group; null is the reward without the overlong "
        "punishment (verl algorithm.filter_groups.metric).",
    )
