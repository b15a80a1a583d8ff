"""Rendering of chat templates, which are untrusted programs, in a limited process.

Reads lines of JSON: {"template", "variables", "cpu_seconds"} once, then lists of conversations; each has the template's
other variables, including `messages`. Answers each list with a line: {"texts": [...]}, or {"conversation": index,
"error": reason} for the first one that fails. It is run by its path and imports nothing of the package.
"""

import json
import math
import resource
import sys
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox

MEMORY_BYTES = 2 << 30  # address space: jinja2 alone takes 0.1 GB, a thousand conversations of 100 kB another 0.1 GB
MOST_CHARACTERS = 16 << 20  # of one prompt
MOST_OF_REASON = 200


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        until = math.ceil(used.ru_utime + used.ru_stime) + settings["cpu_seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (until, most))
        print(json.dumps(_answer(settings, json.loads(line))), flush=True)


def _answer(settings: dict[str, Any], conversations: list[dict[str, Any]]) -> dict[str, Any]:
    texts: list[str] = []
    try:
        template = _compiled(settings["template"])
        for conversation in conversations:
            text = template.render(**settings["variables"], **conversation)
            if len(text) > MOST_CHARACTERS:
                raise ValueError(f"it writes {len(text):,} characters")
            texts.append(text)
    except Exception as error:  # whatever the template raises, the user has to fix it
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return {"conversation": len(texts), "error": reason[:MOST_OF_REASON].rstrip(": ")}
    return {"texts": texts}


@lru_cache(maxsize=1)
def _compiled(template: str) -> jinja2.Template:
    """Compile in a jinja2 environment of HF's dialect, without a loader."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = _json
    return environment.from_string(template)


def _json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Write JSON as HF's filter does, without jinja2's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateError(reason)


if __name__ == "__main__":
    main()
