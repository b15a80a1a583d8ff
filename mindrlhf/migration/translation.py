"""Translation of another suite's keys into settings of this one."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from mindrlhf.configs.layers import write_override

FLAG = "--"  # begins the name of a flag of `mindrlhf train`


class Placed(NamedTuple):
    """Value of one of our keys.

    theirs: the keys that it follows from. words: more about it, for people.
    """

    value: Any
    theirs: tuple[str, ...]
    words: str


@dataclass
class Translation:
    """Keys of another suite as settings of this one.

    given: their dotted key -> value. placed: our dotted setting, key of a model YAML with the role's prefix, or
    `--flag` -> its value. used: their keys in these. needless: their key -> why it has no effect here.
    """

    suite: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]] = {}  # values of their keys that are not given

    given: Mapping[str, Any]
    placed: dict[str, Placed] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    needless: dict[str, str] = field(default_factory=dict)

    def put(self, ours: str, value: Any, *theirs: str, words: str = "") -> None:
        """Set our key, which follows from `theirs`."""
        self.placed[ours] = Placed(value, theirs, words)
        self.used.update(theirs)

    @property
    def overrides(self) -> list[str]:
        """Settings as `group.key=value` each."""
        return [write_override(ours, one.value) for ours, one in self.placed.items() if not ours.startswith(FLAG)]

    @property
    def flags(self) -> dict[str, str]:
        """Flags, without dashes -> value; a flag that the user gives overrides it."""
        return {ours[2:]: str(one.value) for ours, one in self.placed.items() if ours.startswith(FLAG)}

    @property
    def sources(self) -> list[tuple[str, str]]:
        """List (ours, theirs) for people; further lines of `theirs` stand alone."""
        rows = []
        for ours, one in self.placed.items():
            written = f"{ours} {one.value}" if ours.startswith(FLAG) else write_override(ours, one.value)
            first, *others = (", ".join(self._cited(one.theirs)) + one.words).split("\n")
            rows += [(written, first), *(("", other) for other in others)]
        return rows

    def report(self, others: Mapping[str, Iterable[str]]) -> str:
        """Format the settings, and lines below other titles."""
        sources = self.sources
        width = max((len(ours) for ours, _ in sources), default=0)
        parts = {"": [f"{ours:<{width}}  {theirs}" for ours, theirs in sources], **others}
        titled = {title: [f"  {line}" for line in lines] for title, lines in parts.items()}
        shown = [[f"from {self.suite}{title}:", *lines] for title, lines in titled.items() if lines or not title]
        return "\n".join(line for lines in shown for line in lines)

    def _cited(self, theirs: Iterable[str]) -> Iterator[str]:
        for key in theirs:
            if key in self.given:
                yield f"{key}={self.given[key]}"
            elif key in self.defaults:
                yield f"{key}={self.defaults[key]} ({self.suite}'s default)"
