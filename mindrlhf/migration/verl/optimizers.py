"""Rules for verl's optimizers: moments, warm-up and decay of the learning rate."""

from mindrlhf.errors import UserError
from mindrlhf.migration.verl.command import Keys
from mindrlhf.migration.verl.result import VerlTranslation

DECAYS = ("constant", "linear", "cosine")
DECAY_KEYS = ("warmup_style", "lr_scheduler_type", "lr_decay_style")
EIGHT_BITS = ("AdamW8bit", "PagedAdamW8bit")  # of torchao.optim and bitsandbytes.optim


def optimizer(keys: Keys, result: VerlTranslation, theirs: str = "actor", ours: str = "optimizer") -> None:
    """Translate the optimizer of verl's `theirs` to our `ours`."""
    group = f"{theirs}.optim"
    least = f"{group}.min_lr"
    if keys(f"{group}.optimizer") in EIGHT_BITS:
        result.put(f"{ours}.state", "int8", f"{group}.optimizer")
    for name, beta in zip(("beta1", "beta2"), keys(f"{group}.betas"), strict=False):
        result.put(f"{ours}.{name}", beta, f"{group}.betas")
    _warm_up(keys, result, f"{ours}.warmup_steps", f"{group}.lr_warmup_steps")
    style = keys.first(*(f"{group}.{name}" for name in DECAY_KEYS))
    if style and keys(style) in DECAYS:
        result.copy(f"{ours}.lr_decay", style)
    elif style:
        result.refuse(style, f"optimizer.lr_decay is one of {', '.join(DECAYS)}")
    if keys(least) is None:
        result.copy(f"{ours}.min_lr", f"{least}_ratio", lambda share: share * keys.number(f"{group}.lr"))
    else:
        result.copy(f"{ours}.min_lr", least)


def _warm_up(keys: Keys, result: VerlTranslation, ours: str, steps: str) -> None:
    share = f"{steps}_ratio"
    total = "trainer.total_training_steps"
    if keys.positive(steps):
        result.copy(ours, steps)
    elif keys.positive(share):
        if keys.positive(total) is None:
            given = f"{share}={keys(share)} is a share of the run's updates, whose number is not known yet"
            raise UserError(f"--from-verl: {given}; give {total}, or {steps} in its place.")
        result.put(ours, int(keys(share) * keys(total)), share, total)
