"""Log probabilities in the two shapes that OpenAI's API knows: chat's, and that of completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import Any

from replica.answer import ShownToken
from replica.runner import TokenLogprobs

__all__ = ["BytesOf", "chat_logprobs", "completion_logprobs"]

BytesOf = Callable[[int], bytes]
"""A token's bytes, by its id."""


def chat_logprobs(tokens: Iterable[ShownToken], bytes_of: BytesOf) -> dict[str, Any]:
    """A list of tokens, each with its bytes (a token may be half a character) and its likeliest rivals."""
    content = []
    for _, (token, logprob, top) in tokens:
        rivals = [_chat_token(rival, rival_logprob, bytes_of) for rival, rival_logprob in top]
        content.append(_chat_token(token, logprob, bytes_of) | {"top_logprobs": rivals})
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Items[ShownToken], bytes_of: BytesOf) -> dict[str, Any]:
    """Four lists of equal length. The token itself is among `top_logprobs` even where it is none of the likeliest."""
    return {
        "tokens": [_text(bytes_of(shown.logprobs.token)) for shown in tokens],
        "token_logprobs": [shown.logprobs.logprob for shown in tokens],
        "top_logprobs": [_likeliest(shown.logprobs, bytes_of) for shown in tokens],
        "text_offset": [shown.offset for shown in tokens],
    }


def _likeliest(logprobs: TokenLogprobs, bytes_of: BytesOf) -> dict[str, float]:
    likeliest: dict[str, float] = {}
    for token, logprob in (*logprobs.top, (logprobs.token, logprobs.logprob)):
        likeliest.setdefault(_text(bytes_of(token)), logprob)  # halves of characters look alike: the likelier one stays
    return likeliest


def _chat_token(token: int, logprob: float, bytes_of: BytesOf) -> dict[str, Any]:
    its_bytes = bytes_of(token)
    return {"token": _text(its_bytes), "logprob": logprob, "bytes": list(its_bytes)}


def _text(its_bytes: bytes) -> str:
    return its_bytes.decode(errors="replace")
