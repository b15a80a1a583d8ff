"""Claims as data: arms, and what is said about their difference; claims.yaml holds them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindrlhf.errors import UserError

FILE = Path(__file__).with_name("claims.yaml")
MORE, LESS, SAME = "more", "less", "same"


@dataclass(frozen=True)
class Claim:
    """A statement about two arms.

    says: the second arm has MORE or LESS of the metric than the first, or the SAME. least: smallest difference that
    matters, in the metric's unit. first_step, last_step: window of steps over which the metric is averaged.
    """

    name: str
    text: str
    source: str
    first: str
    second: str
    metric: str
    first_step: int
    last_step: int
    says: str
    least: float


@dataclass(frozen=True)
class Claims:
    """All claims. common: settings of every run; arms: name -> settings over these; start: of the start model.

    start: the groups `problems` (options of `mindrlhf synthesize`), `shape` (keys of a model YAML's model_config) and
    `warm_up` (settings of `mindrlhf sft`).
    """

    start: Mapping[str, Any]
    common: Sequence[str]
    arms: Mapping[str, Sequence[str]]
    claims: Sequence[Claim]

    def chosen(self, names: Sequence[str]) -> list[Claim]:
        """Claims of these names, or all. Raises UserError for an unknown name."""
        known = {claim.name: claim for claim in self.claims}
        for name in names:
            if name not in known:
                raise UserError(f"there is no claim {name}; the claims are {', '.join(known)}.")
        return [known[name] for name in names] if names else list(self.claims)


def read_claims(path: Path = FILE) -> Claims:
    """Read and check the records. Raises UserError for a record that cannot be tried."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    arms = {name: tuple(_flat(settings)) for name, settings in content["arms"].items()}
    claims = [_claim(path, name, values, arms) for name, values in content["claims"].items()]
    return Claims(start=content["start"], common=tuple(content["common"]), arms=arms, claims=claims)


def _flat(settings: Sequence[Any]) -> Iterator[str]:
    """Settings of a list that may hold lists."""
    for one in settings:
        yield from (one,) if isinstance(one, str) else _flat(one)


def _claim(path: Path, name: str, values: Mapping[str, Any], arms: Mapping[str, Sequence[str]]) -> Claim:
    where = f"{path}: claim {name}"
    for arm in values["arms"]:
        if arm not in arms:
            raise UserError(f"{where}: there is no arm {arm}; the arms are {', '.join(arms)}.")
    if values["says"] not in (MORE, LESS, SAME):
        raise UserError(f"{where}: says is {values['says']}, and should be {MORE}, {LESS} or {SAME}.")
    first, second = values["arms"]
    first_step, last_step = values["steps"]
    if not 1 <= first_step <= last_step:
        raise UserError(f"{where}: steps is {values['steps']}, and should be the first and the last step of a window.")
    return Claim(
        name=name,
        text=values["text"],
        source=values["source"],
        first=first,
        second=second,
        metric=values["metric"],
        first_step=first_step,
        last_step=last_step,
        says=values["says"],
        least=float(values["least"]),
    )
