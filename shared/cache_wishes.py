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
_ANTHROPIC_SECONDS = {"5m": 300.0, "1h": 3_600.0}


def openai_keep_seconds(fields: Fields) -> float:
    wish = fields.text("prompt_cache_retention", "in_memory")
    if wish not in _OPENAI_SECONDS:
        raise invalid_value(fields.path("prompt_cache_retention"), 'must be "in_memory" or "24h"')
    return _OPENAI_SECONDS[wish]


def anthropic_keep_seconds(fields: Fields) -> float:
    """Reads what the prompt was made of: call it once that is known to be right."""
    return max((_seconds(mark) for mark in _marks(fields)), default=0.0)


def _marks(fields: Fields) -> Iterator[Fields]:
    """Every `cache_control` there is."""
    parts = [(name, fields.raw(name)) for name in ("system", "tools")]
    turns = fields.objects("messages")
    parts += [(f"messages[{index}].content", turn.get("content")) for index, turn in enumerate(turns)]
    if "cache_control" in fields:
        yield fields.nested("cache_control")
    for name, part in parts:
        for index, block in enumerate(part if isinstance(part, list) else ()):
            if isinstance(block, dict) and block.get("cache_control") is not None:
                yield Fields(block, f"{name}[{index}]").nested("cache_control")


def _seconds(mark: Fields) -> float:
    ttl = mark.text("ttl", "5m")
    if ttl not in _ANTHROPIC_SECONDS:
        raise invalid_value(mark.path("ttl"), 'must be "5m" or "1h"')
    return _ANTHROPIC_SECONDS[ttl]
