"""Self-contained HTML pages: style and script are inside, and no other script may run."""

import base64
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Environment, StrictUndefined


def fill_page(
    template: str, style: str, script: str, values: Mapping[str, Any], filters: Mapping[str, Callable] | None = None
) -> str:
    """Fill a page's template.

    It gets `style`, `script` and `script_hash`, the base64 of the script's SHA-256 for the policy, besides `values`.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters.update(filters or {})
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.from_string(template).render(values, style=style, script=script, script_hash=digest)
