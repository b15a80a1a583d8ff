"""GRPO from Python."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindrlhf.api.config import GRPOConfig
from mindrlhf.api.objects import importable_names, named_functions, refuse_given
from mindrlhf.api.trainer import Trainer
from mindrlhf.errors import UserError
from mindrlhf.job import Job, Objects
from mindrlhf.run.stop_signals import StopSignals
from mindrlhf.trainer.check import check
from mindrlhf.trainer.start import Steps, grpo_steps

# Argument -> what would be right.
NOT_DONE = {
    "reward_processing_classes": "reward models are functions that load theirs, so leave it out",
    "optimizers": "AdamW is the optimizer, set by learning_rate, lr_scheduler_type and adam_beta1",
    "rollout_func": "set tools or environment_factory for conversations of your own, or leave it out",
    "quantization_config": "rollout={'weights': 'int8'} packs the weights that generate; leave it out",
}
Reward = Callable[..., Any] | str


class GRPOTrainer(Trainer):
    """GRPO of a language model, with TRL's arguments.

    model: folder in Hugging Face's format, or a hub's id. reward_funcs: functions in TRL's form or one of ours, which
    run in this process; names of shipped functions, or `file.py:function`, which run in other processes; None keeps the
    configuration's. train_dataset, eval_dataset: rows with `prompt` as text or messages, or as `mindrlhf data` reads
    them; a `datasets.Dataset`; a JSONL, JSON or parquet file, or a MindRecord. processing_class: a tokenizer instead of
    the model's. peft_config: a `LoraConfig`, or a mapping of its values. tools, environment_factory: functions and a
    class from a file, which other processes import, or names. Under msrun every process makes the same trainer.
    """

    args: GRPOConfig
    loss = "actor/loss"
    sampling = "rollout"

    def __init__(
        self,
        model: str | Path,
        reward_funcs: Reward | Sequence[Reward] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: None = None,
        callbacks: Iterable[Any] | None = None,
        optimizers: tuple[None, None] = (None, None),
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any] | str] | None = None,
        rollout_func: None = None,
        environment_factory: Callable[..., Any] | str | None = None,
        quantization_config: None = None,
    ):
        given = locals() | {"optimizers": None if tuple(optimizers) == (None, None) else optimizers}
        refuse_given("GRPOTrainer", given, NOT_DONE)
        self._names: list[str] | None = None
        self._functions: dict[str, Callable[..., Any]] = {}
        if reward_funcs is not None:
            self._names, self._functions = named_functions(reward_funcs)
        self._tools = importable_names(tools, "tools")
        self._environment = importable_names(
            [environment_factory] if environment_factory else None, "environment_factory"
        )
        args = GRPOConfig() if args is None else args
        super().__init__(model, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config)

    def plan(self) -> str:
        """Describe what the run would hold, compute and move, as `mindrlhf plan` does."""
        from mindrlhf.commands.memory_plan import describe_plan

        return describe_plan(self._flags(), self._objects())

    def _arguments(self) -> dict[str, Any]:
        given: dict[str, Any] = {}
        weights = self.args.reward_weights
        if self._names is not None:
            weights = [1.0] * len(self._names) if weights is None else list(weights)
            if len(weights) != len(self._names):
                found = f"GRPOConfig: reward_weights has {len(weights)} numbers for {len(self._names)} functions"
                raise UserError(f"{found}; give one for each.")
            pairs = zip(self._names, weights, strict=True)
            given["reward.functions"] = [{"name": name, "weight": float(weight)} for name, weight in pairs]
        if self.args.settings().validation.reward is None and self._functions:
            given["validation.reward"] = "all"
        if self._environment:
            given["rollout.environment"] = self._environment[0]
        if self._tools:
            given["rollout.tools"] = self._tools
        return given

    def _objects(self) -> Objects:
        return replace(super()._objects(), functions=self._functions)

    def _check(self, flags: Any) -> Job:
        return check(flags, self._objects())

    def _run(self, job: Job, signals: StopSignals) -> Steps:
        return grpo_steps(job, signals)
