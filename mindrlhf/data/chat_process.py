"""Rendering of chat templates, which are others' programs, in a process with limits.

Reads {"template", "tokens", "conversations", "cpu_seconds"} as JSON; writes {"texts": [...]}, or {"conversation":
index, "error": reason} for the first one that fails. Run by its path: imports nothing of the package.
"""

import json
import resource
import sys
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox

MEMORY_BYTES = 2 << 30  # of addresses: jinja2 alone takes 0.1 GB, a thousand conversations of 100 kB as much again
MOST_CHARACTERS = 16 << 20  # of one prompt
MOST_OF_REASON = 200


def main() -> None:
    request = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_seconds"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    json.dump(_answer(request), sys.stdout)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    texts: list[str] = []
    try:
        template = _environment().from_string(request["template"])
        for messages in request["conversations"]:
            text = template.render(messages=messages, add_generation_prompt=True, **request["tokens"])
            if len(text) > MOST_CHARACTERS:
                raise ValueError(f"it writes {len(text):,} characters")
            texts.append(text)
    except Exception as error:  # whatever the template raises is for the user to mend
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return {"conversation": len(texts), "error": reason[:MOST_OF_REASON].rstrip(": ")}
    return {"texts": texts}


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Make a jinja2 environment of HF's dialect, without a loader."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    return environment


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateError(reason)


if __name__ == "__main__":
    main()
