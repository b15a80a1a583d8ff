"""Typed settings of the algorithm: advantage, loss, KL, correction, dynamic sampling.

A setting whose default is null belongs to some methods only and is made from their signatures. Null means the method's
own value; setting it for a method without this option is refused (`validate.py`).
"""

from inspect import Parameter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model

from mindrlhf.algorithms.advantages import ADVANTAGES, AdvantageMethod
from mindrlhf.algorithms.losses import POLICY_LOSSES, Level, PolicyLoss, policy_loss
from mindrlhf.algorithms.methods import DESCRIPTIONS, Method
from mindrlhf.configs.base import Float32, Settings, representable


def _field(name: str, takers: dict[str, Parameter]) -> tuple[Any, Any]:
    """Make a setting from the methods' options; the first type is widest."""
    options = list(takers.values())
    annotation = Annotated[options[0].annotation, AfterValidator(representable)]
    own = {taker: option.default for taker, option in takers.items() if option.default is not None}
    null = "off" if not own else ", ".join(f"{value} for {taker}" for taker, value in own.items())
    text = DESCRIPTIONS[name]
    end = text.rfind(" (") if text.endswith(").") else len(text) - 1
    description = f"{text[:end]}; null is the method's own: {null}{text[end:]}" if own else text
    return annotation | None, Field(None, description=description)


_OPTIONS = create_model(
    "MethodOptions",
    __base__=Settings,
    **{name: _field(name, takers) for of in (ADVANTAGES, POLICY_LOSSES) for name, takers in of.offered().items()},
)


class AlgorithmSettings(_OPTIONS):
    """Advantage, loss and KL."""

    advantage: str = "grpo"
    """Advantage estimator (verl algorithm.adv_estimator)."""
    advantage_options: dict[str, Any] = {}
    """Options, by name, of your own advantage function (`file.py:function`)."""
    policy_loss: str = "clip"
    """Policy loss (verl actor.policy_loss.loss_mode, TRL loss_type)."""
    policy_loss_options: dict[str, Any] = {}
    """Options, by name, of your own policy loss (`file.py:function`)."""
    aggregation: str = "seq-mean-token-mean"
    """Reduction of the token losses to one number (verl actor.loss_agg_mode)."""
    aggregation_tokens: int | None = Field(None, ge=1)
    """Constant that seq-mean-token-sum-norm and dr_grpo divide by; null is rollout.max_new_tokens (verl
    actor.loss_scale_factor)."""
    mask_truncated: bool = False
    """Do not train on responses cut off at the token limit (TRL mask_truncated_completions)."""
    entropy_coef: Float32 = Field(0.0, ge=0.0)
    """Weight of the entropy, subtracted from the loss (verl actor.entropy_coeff, TRL entropy_coef)."""
    kl_estimator: str = "k3"
    """KL estimator against the reference model (verl actor.kl_loss_type, algorithm.kl_penalty)."""
    kl_bias_correction: bool = False
    """Multiply the KL term of the loss by the importance ratio, whose gradient makes that of k1 or k3 unbiased (TRL
    use_bias_correction_kl)."""
    beta: Float32 = Field(0.01, ge=0.0)
    """Weight of the KL term (verl actor.kl_loss_coef, TRL beta); 0 loads no reference model."""
    kl_in_reward: bool = False
    """Subtract the KL term from the reward of each token instead of adding it to the loss (verl
    algorithm.use_kl_in_reward)."""
    kl_target: Float32 | None = Field(None, gt=0.0)
    """Target KL per token, in nats, that beta is adjusted to; null keeps beta fixed (verl algorithm.kl_ctrl.target_kl
    with type adaptive)."""
    kl_horizon: int = Field(10000, ge=1)
    """With kl_target: number of responses over which beta may change by a fifth (verl algorithm.kl_ctrl.horizon)."""
    reference_sync_steps: int = Field(0, ge=0)
    """Steps between two updates of the reference model from the policy; 0 means never (TRL sync_ref_model,
    ref_model_sync_steps)."""
    reference_sync_share: Float32 = Field(1.0, gt=0.0, le=1.0)
    """Share of the policy in the reference model after such an update (TRL ref_model_mixup_alpha)."""
    teacher: str | None = None
    """Model that the advantage `distillation` learns from: an HF directory or a hub's id; any size, with the policy's
    tokenizer."""
    num_iterations: int = Field(1, ge=1)
    """Passes over a step's rollouts (verl actor.ppo_epochs, TRL num_iterations)."""
    updates_per_iteration: int = Field(1, ge=1)
    """Optimizer updates of one pass (verl data.train_batch_size / actor.ppo_mini_batch_size)."""

    def options_of(self, method: Method) -> dict[str, Any]:
        """Collect the given settings of an advantage or a policy loss: option -> value."""
        given = {name: getattr(self, name) for name in method.options if name in DESCRIPTIONS}
        extra = self.advantage_options if method.what == ADVANTAGES.what else self.policy_loss_options
        return {name: value for name, value in given.items() if value is not None} | extra

    @property
    def method(self) -> AdvantageMethod:
        """Find the chosen advantage. Raises UserError for an unknown name."""
        return ADVANTAGES.find(self.advantage)

    def loss(self) -> PolicyLoss:
        """Make the chosen policy loss with its options, as `policy_loss` does; imports MindSpore."""
        return policy_loss(self.policy_loss, self.options_of(POLICY_LOSSES.find(self.policy_loss)))

    @property
    def kl_ratio(self) -> Level | None:
        """Level of the ratio that multiplies the KL term, or None."""
        level = self.importance_level or ("sequence" if self.policy_loss == "gspo" else "token")
        return level if self.kl_bias_correction else None

    @property
    def uses_critic(self) -> bool:
        """True when the advantage needs values of a critic."""
        return self.method.uses_values

    @property
    def single_update(self) -> bool:
        """True when a step's rollouts are used for one update."""
        return self.num_iterations * self.updates_per_iteration == 1

    def scores_old_policy(self, dropout: float) -> bool:
        """Tell whether the old log-probs need a forward pass of their own.

        dropout: rate in updates. With dropout, or with several updates, no update gives them all.
        """
        return self.updates_per_iteration > 1 or dropout > 0

    @property
    def reads_policy(self) -> bool:
        """True when the policy's log-probs make advantages, steer beta, or choose tokens."""
        reads_kl = self.beta > 0 and (self.kl_in_reward or self.kl_target is not None)
        return reads_kl or self.method.uses_teacher or POLICY_LOSSES.find(self.policy_loss).selects


class RolloutCorrectionSettings(Settings):
    """Importance weights for rollouts drawn from a distribution other than the trained one."""

    level: Literal["token", "sequence"] | None = None
    """Weight of each token, or the product of the weights of its row; null corrects nothing (verl
    algorithm.rollout_correction.rollout_is, TRL vllm_importance_sampling_correction)."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Weights beyond the bounds are set to the bound, or to 0 (TRL vllm_importance_sampling_mode)."""
    upper: Float32 = Field(2.0, gt=0.0)
    """Upper bound of the weight (verl algorithm.rollout_correction.rollout_is_threshold, TRL
    vllm_importance_sampling_cap)."""
    lower: Float32 = Field(0.0, ge=0.0)
    """Lower bound of the weight (verl algorithm.rollout_correction.rollout_rs_threshold_lower)."""


class DynamicSamplingSettings(Settings):
    """DAPO's dynamic sampling: new groups replace those with equal rewards."""

    enabled: bool = False
    """Draw more prompts to replace groups with equal rewards (verl algorithm.filter_groups.enable)."""
    max_rounds: int = Field(10, ge=1)
    """Maximum rounds of generation for one step, which then trains on the groups it has (verl
    algorithm.filter_groups.max_num_gen_batches)."""
    prompts_per_round: int | None = Field(None, ge=1)
    """Prompts of one round; null is data.prompts_per_step (verl data.gen_batch_size)."""
    metric: str | None = None
    """Reward function whose scores must differ within a group; null is the reward without the overlong punishment (verl
    algorithm.filter_groups.metric)."""
