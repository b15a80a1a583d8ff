"""Rendering of chat templates, which are untrusted programs, in a limited process.

Reads lines of JSON: {"template", "variables", "cpu_seconds"} once, then {"conversations", "marked"}; each conversation
has the template's other variables, including `messages`. Answers with a line: {"texts": [...]}, or {"conversation":
index, "error": reason} for the first one that fails. Marked texts are lists of [text, whether a `{% generation %}`
block wrote it]. It is run by its path and imports nothing of the package.
"""

import json
import math
import resource
import secrets
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY_BYTES = 2 << 30  # address space: jinja2 alone takes 0.1 GB, a thousand conversations of 100 kB another 0.1 GB
MOST_CHARACTERS = 16 << 20  # of one prompt
MOST_OF_REASON = 200
GIVEN = {"tools": None, "documents": None}  # variables that a template always has
MARK = " mark"  # no variable of a template: its name has a space


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        until = math.ceil(used.ru_utime + used.ru_stime) + settings["cpu_seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (until, most))
        print(json.dumps(answer(settings, json.loads(line))), flush=True)


def answer(settings: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Render the conversations of a request, both as this file's text describes them."""
    texts: list[Any] = []
    try:
        template = _compiled(settings["template"])
        template.environment.globals[MARK] = mark = secrets.token_hex() if request["marked"] else ""
        for conversation in request["conversations"]:
            text = template.render({**GIVEN, **settings["variables"], **conversation})
            if len(text) > MOST_CHARACTERS:
                raise ValueError(f"it writes {len(text):,} characters")
            pieces = enumerate(text.split(mark)) if mark else ()
            texts.append([(piece, number % 2 == 1) for number, piece in pieces] if mark else text)
    except Exception as error:  # whatever the template raises, the user has to fix it
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return {"conversation": len(texts), "error": reason[:MOST_OF_REASON].rstrip(": ")}
    return {"texts": texts}


@lru_cache(maxsize=1)
def _compiled(template: str) -> jinja2.Template:
    """Compile in a jinja2 environment of HF's dialect, without a loader."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    environment.filters["tojson"] = _json
    return environment.from_string(template)


class Generation(jinja2.ext.Extension):
    """Blocks `{% generation %}` around the model's words, which stand between marks."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        mark = self.environment.globals[MARK]
        return f"{mark}{caller()}{mark}"


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as HF's filter does, without jinja2's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateError(reason)


if __name__ == "__main__":
    main()
