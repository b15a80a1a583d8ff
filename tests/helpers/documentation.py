"""What README.md and docs/ say, cut into pieces that tests can hold against the program: fenced blocks and commands."""

import importlib.util
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from mindrlhf.configs.base import Settings, is_group

ROOT = Path(__file__).resolve().parents[2]
SHELL = ("bash", "")  # a block without a language counts as commands too
OTHER = ("python", "yaml", "text", "diff")

# What a training command of the documentation gets behind its own settings; the later one holds.
SMALL = (
    "data.prompts_per_step=2",
    "rollout.num_generations=2",
    "rollout.max_new_tokens=8",
    "rollout.min_new_tokens=0",
    "train.length_bucket=64",
)


@dataclass(frozen=True)
class Block:
    """A fenced block. page: relative to the project. line: of its first line of text."""

    page: str
    line: int
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command of a shell block. where: `docs/page.md:12`. text: its lines in one. words: as the shell has them."""

    where: str
    text: str
    words: tuple[str, ...]

    def begins(self, start: str) -> bool:
        return self.text.startswith(start)


def pages() -> list[str]:
    """The README and every page of the site that is written by hand."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def blocks(page: str) -> list[Block]:
    found, start, language = [], None, ""
    lines = (ROOT / page).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        fence = re.fullmatch(r"\s*```(\w*)", line)
        if fence and start is None:
            start, language = number, fence[1]
        elif fence:
            found.append(Block(page, start + 1, language, "\n".join(lines[start : number - 1])))
            start = None
    assert start is None, f"{page}:{start}: a fenced block has no end"
    return found


def commands(page: str) -> list[Command]:
    """All commands of the page's shell blocks, in order."""
    found = []
    for block in blocks(page):
        assert block.language in SHELL + OTHER, f"{page}:{block.line}: what is a {block.language} block?"
        if block.language in SHELL:
            found += _commands(block)
    return found


def _commands(block: Block) -> list[Command]:
    found, text, first = [], "", block.line
    for number, line in enumerate(block.text.split("\n"), block.line):
        first = first if text else number
        text += line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        words = tuple(shlex.split(text, comments=True))
        if words:
            found.append(Command(f"{block.page}:{first}", text.strip(), words))
        text = ""
    assert not text, f"{block.page}:{first}: the last line of the block ends with a backslash"
    return found


def named(page: str) -> list[str]:
    """Everything in single backticks outside of fenced blocks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"`([^`\n]+)`", re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.MULTILINE | re.DOTALL))


def settings(config: type[Settings], prefix: str = "") -> dict[str, str]:
    """Key -> description of every setting, those of groups within groups too."""
    found = {}
    for name, field in config.model_fields.items():
        if is_group(field.annotation):
            found |= settings(field.annotation, f"{prefix}{name}.")
        else:
            found[prefix + name] = field.description
    return found


def generated_pages() -> ModuleType:
    """`scripts/generated_pages.py`, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("generated_pages", ROOT / "scripts" / "generated_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
