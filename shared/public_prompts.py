"""The file in which an operator registers what all tenants may share: one JSON body a line, as `/tokenize` takes it.

    {"messages": [{"role": "system", "content": "You are the assistant of ..."}]}
    {"prompt": "Translate from English to French.\\n\\n"}

Blank lines and lines that begin with `#` are skipped. Reading needs no model, so what is malformed is found at the
start; that a model's template refuses a line shows once the model is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.api import ApiError, parse_tokenize
from shared.prompts import ChatPrompt, PromptEncoder, PromptError, PromptInput

__all__ = ["PublicPrompt", "PublicPromptsError", "encode_public_prompts", "read_public_prompts"]

_MOST_FILE_BYTES = 2**24


class PublicPromptsError(Exception):
    """The file cannot be used. One line, which names it and the line at fault."""


@dataclass(frozen=True, slots=True)
class PublicPrompt:
    source: str
    """The file and the line."""
    prompt: PromptInput


def read_public_prompts(path: Path) -> list[PublicPrompt]:
    """The registered beginnings. Of messages, what their template writes before an answer would begin."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_FILE_BYTES + 1).decode()
    except OSError as error:
        raise PublicPromptsError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PublicPromptsError(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from None
    if len(text.encode()) > _MOST_FILE_BYTES:
        raise PublicPromptsError(f"{path}: is over {_MOST_FILE_BYTES} bytes")
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        source = f"{path}, line {number}"
        try:
            prompt = parse_tokenize(line.encode()).prompt
        except ApiError as error:
            raise PublicPromptsError(f"{source}: {error}") from None
        if isinstance(prompt, ChatPrompt):
            prompt = msgspec.structs.replace(prompt, add_generation_prompt=False, continue_final_message=False)
        prompts.append(PublicPrompt(source, prompt))
    return prompts


def encode_public_prompts(prompts: Iterable[PublicPrompt], encoder: PromptEncoder) -> list[list[int]]:
    """Their token ids. Raises PublicPromptsError where the model's template refuses one."""
    encoded = []
    for public in prompts:
        try:
            encoded.append(encoder.encode(public.prompt).token_ids)
        except PromptError as error:
            raise PublicPromptsError(f"{public.source}: {error}") from None
    return encoded
