"""How long a request wishes its prompt to stay in the replica's cache, in either dialect.

    OpenAI      prompt_cache_retention: "24h"                       "in_memory" and none at all: no wish
    Anthropic   cache_control: {"type": "ephemeral", "ttl": "1h"}   on the request, or on any part of the prompt;
                                                                    "5m" without ttl. The longest counts.

A wish is for the whole prompt, which is what a longer conversation will begin with.
"""

from __future__ import annotations

from collections.abc import Iterator

from shared.api_errors import invalid_value
from shared.api_fields import Fields

__all__ = ["anthropic_keep_seconds", "openai_keep_seconds"]

_OPENAI_SECONDS = {"in_memory": 0.0, "in-memory": 0.0, "24h": 86_400.0}
_PARTS = ("system", "tools", "messages", "content")
_DEEPEST_MARK = 3
"""On a text within a tool's result, which stands in a message."""
_MOST_MARKS = 4
_ANTHROPIC_SECONDS = {"5m": 300.0, "1h": 3_600.0}


def openai_keep_seconds(fields: Fields) -> float:
    wish = fields.text("prompt_cache_retention", "in_memory")
    if wish not in _OPENAI_SECONDS:
        raise invalid_value(fields.path("prompt_cache_retention"), 'must be "in_memory" or "24h"')
    return _OPENAI_SECONDS[wish]


def anthropic_keep_seconds(fields: Fields) -> float:
    """Reads what the prompt was made of: call it once that is known to be right."""
    wishes = [_seconds(mark) for mark in _marks(fields)]
    if len(wishes) > _MOST_MARKS:
        message = f"stands in {len(wishes)} places: at most {_MOST_MARKS} are allowed"
        raise invalid_value(fields.path("cache_control"), message)
    return max(wishes, default=0.0)


def _marks(fields: Fields, depth: int = _DEEPEST_MARK) -> Iterator[Fields]:
    """Every `cache_control` there is."""
    if "cache_control" in fields:
        yield fields.nested("cache_control")
    for name in _PARTS if depth else ():
        parts = fields.raw(name)
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict):
                yield from _marks(Fields(part, f"{fields.path(name)}[{index}]"), depth - 1)


def _seconds(mark: Fields) -> float:
    if mark.raw("type") != "ephemeral":
        raise invalid_value(mark.path("type"), 'must be "ephemeral"')
    ttl = mark.text("ttl", "5m")
    if ttl not in _ANTHROPIC_SECONDS:
        raise invalid_value(mark.path("ttl"), 'must be "5m" or "1h"')
    return _ANTHROPIC_SECONDS[ttl]
