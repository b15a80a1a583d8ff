"""Rules for the keys of TRL's `GRPOConfig` that are not just renamed settings."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.errors import UserError
from mindrlhf.migration.trl.names import DEFAULTS
from mindrlhf.migration.trl.rules import RunRules
from mindrlhf.migration.trl.translation import RunSizes, TRLTranslation

PRESET = "preset:trl"
PROMPTS = "data.prompts_per_step"
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
NO_BOUND = 1e9  # above every weight: their logs are clamped to 20
# loss_type -> policy loss, aggregation; None where the loss fixes it.
LOSSES = {
    "grpo": ("clip", "seq-mean-token-mean"),
    "dapo": ("clip", "token-mean"),
    "bnpo": ("clip", "token-mean"),
    "dr_grpo": ("clip", "dr_grpo"),
    "luspo": ("clip", "seq-mean-token-sum"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", None),
}
# Key of generation_kwargs -> setting of rollout.
GENERATION = dict.fromkeys(("stop", "stop_strings"), "stop_strings") | {
    **dict.fromkeys(("min_new_tokens", "min_tokens"), "min_new_tokens"),
    **dict.fromkeys(("max_new_tokens", "max_tokens"), "max_new_tokens"),
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
}


def translate_grpo(
    given: Mapping[str, Any], base: GRPOSettings, own: Collection[str], around: RunSizes, where: str = "GRPOConfig"
) -> TRLTranslation:
    """Translate the keys of a `GRPOConfig`.

    base: the settings that the keys override. own: dotted settings that the user gave under our names. Raises UserError
    for a key that is not TRL's, and for a value that is not supported here.
    """
    return _GRPO(given, where=where, settings=GRPOSettings, base=base, own=own, around=around).applied()


@dataclass
class _GRPO(RunRules):
    """Rules of GRPO's own keys."""

    rules = (
        *("batch", "loss", "advantage", "reference", "correction", "sampling"),
        *("length", "schedule", "evaluation", "saving", "outputs"),
    )
    measured = ("eval_reward",)

    def loss(self) -> None:
        """Choose policy loss, aggregation and their options by loss_type."""
        name = self("loss_type")
        if name is not None and name not in LOSSES:
            raise self.refuse("loss_type", f"which is not done here; set it to one of {', '.join(LOSSES)}")
        if name is not None:
            loss, aggregation = LOSSES[name]
            self.put("algorithm.policy_loss", loss, "loss_type")
            if aggregation:
                self.put("algorithm.aggregation", aggregation, "loss_type")
        else:
            loss = self.base.algorithm.policy_loss
        low, high = self("epsilon"), self("epsilon_high")
        if loss == "clip" and low is not None:
            self.put("algorithm.epsilon_low", low, "epsilon")
        if loss == "cispo" and name:
            self.put("algorithm.cispo_cap", "absolute", "loss_type")
            high = DEFAULTS["epsilon"] if high is low is None else high
        if loss != "sapo" and (high is not None or low is not None):
            self.put("algorithm.epsilon_high", low if high is None else high, "epsilon_high")
        for key, ours in {"sapo_temperature_pos": "tau_positive", "sapo_temperature_neg": "tau_negative"}.items():
            if loss == "sapo":
                self.copy(f"algorithm.{ours}", key)
            elif self(key) is not None:
                self.needless[key] = "it belongs to loss_type sapo"
        if name == "bnpo" and self.peek("gradient_accumulation_steps", 1) != 1:
            raise self.refuse("loss_type", "a mean over each accumulated batch; set it to dapo, the mean over all")
        if name == "luspo" and self.peek("importance_sampling_level") != "sequence":
            raise self.refuse("loss_type", "which needs importance_sampling_level='sequence'; set it too")

    def advantage(self) -> None:
        """Choose how rewards are scaled."""
        self("reward_weights")  # the trainer gives them to its functions
        scale = self("scale_rewards")
        if scale is not None:
            self.put("algorithm.advantage_std", {True: "group", False: "none"}.get(scale, scale), "scale_rewards")
        way = self("multi_objective_aggregation")
        if way not in (None, "sum_then_normalize", "normalize_then_sum"):
            right = "set it to sum_then_normalize or normalize_then_sum"
            raise self.refuse("multi_objective_aggregation", f"which is not done here; {right}")
        if way is not None:
            value = way == "normalize_then_sum" or None
            self.put("algorithm.normalize_functions", value, "multi_objective_aggregation")

    def reference(self) -> None:
        """Set when the reference model follows the policy."""
        keys = ("ref_model_sync_steps", "ref_model_mixup_alpha")
        steps, share = (self(key, DEFAULTS[key]) for key in keys)
        if self("sync_ref_model"):
            self.put(
                "algorithm.reference_sync_steps", self._steps("ref_model_sync_steps", steps), "ref_model_sync_steps"
            )
            self.put("algorithm.reference_sync_share", share, "ref_model_mixup_alpha")

    def correction(self) -> None:
        """Set importance weights, which TRL has with vLLM only."""
        keys = [f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_max", "clip_min", "cap")]
        on, mode, most, least, cap = (self(key) for key in keys)
        given = {key for key in keys if self.peek(key) is not None or (key == keys[2] and key in self.given)}
        if on is False or not self.peek("use_vllm"):
            self.needless |= dict.fromkeys(given, "one engine generates and trains")
        elif given:
            level, _, way = (mode or DEFAULTS[keys[1]]).partition("_")
            most = NO_BOUND if keys[2] in given and most is None else most or DEFAULTS[keys[2]]
            self.put("rollout_correction.level", level, keys[1])
            self.put("rollout_correction.mode", way, keys[1])
            self.put("rollout_correction.upper", cap or most, keys[2])
            self.put("rollout_correction.lower", least or 0.0, keys[3])

    def sampling(self) -> None:
        """Set limits and other arguments of generation."""
        if "max_completion_length" in self.given and self.given["max_completion_length"] is None:
            raise self.refuse("max_completion_length", "and a limit is needed here; give a number of tokens")
        for key, value in self("generation_kwargs", {}).items():
            if key not in GENERATION:
                known = ", ".join(GENERATION)
                raise self.refuse("generation_kwargs", f"and {key} is not done here; give any of {known}")
            value = [value] if key in ("stop", "stop_strings") and isinstance(value, str) else value
            self.put(f"rollout.{GENERATION[key]}", value, "generation_kwargs")
        count = self("num_generations_eval")
        if count is not None:
            self.put("validation.num_generations", count, "num_generations_eval")
            if count > 1:  # with temperature 0 they would be all the same
                temperature = self.peek("temperature", self.base.rollout.temperature)
                self.put("validation.temperature", temperature, "num_generations_eval")
        if self("log_completions"):
            every = self.peek("logging_steps") or self.base.trainer.log_every
            self.put("trainer.log_completions_every", max(1, int(every) // self.updates), "log_completions")
        calls = self("max_tool_calling_iterations")
        if calls is not None:
            self.put("rollout.max_turns", calls + 1, "max_tool_calling_iterations")

    def batch(self) -> None:
        """Count prompts and updates of a step: TRL counts completions of one device."""
        size, accumulation, steps, whole = (self(key) for key in BATCH)
        named = [key for key in BATCH if self.peek(key) is not None]
        iterations = self.peek("num_iterations") or self.base.algorithm.num_iterations
        if PROMPTS in self.own:
            if named:
                raise self.refuse(named[0], f"and {PROMPTS} is given; leave one of them out")
            self.rows = self.base.data.prompts_per_step
            self.updates = self.base.algorithm.updates_per_iteration * iterations
            return
        if steps and whole:
            raise self.refuse("generation_batch_size", "and steps_per_generation is given; leave one of them out")
        size = size or DEFAULTS[BATCH[0]]
        accumulation = accumulation or 1
        devices = self.around.devices or 1
        if whole:
            steps = self._whole(
                "generation_batch_size", whole, size * devices, f"{size} completions x {devices} devices"
            )
        steps = steps or accumulation
        updates = self._whole("steps_per_generation", steps, accumulation, "gradient_accumulation_steps")
        self.updates = updates * iterations
        if self.around.devices is None:
            return
        generations = self.peek("num_generations") or self.base.rollout.num_generations
        whole = size * devices * steps
        if whole % generations:
            least = math.lcm(generations, devices * steps) // (devices * steps)
            raise UserError(
                f"{self.where}: per_device_train_batch_size {size} x {devices} devices x {steps} steps of generation "
                f"are {whole} completions, which num_generations {generations} does not divide; set "
                f"per_device_train_batch_size to {least}, or num_generations to a divisor of {whole}."
            )
        self.rows = whole // generations
        self.put(PROMPTS, self.rows, BATCH[0])
        self.put("algorithm.updates_per_iteration", updates, BATCH[2])
