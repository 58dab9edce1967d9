"""The file in which an operator registers what all tenants may share: one JSON body a line, as `/tokenize` takes it.

    {"messages": [{"role": "system", "content": "You are the assistant of ..."}]}
    {"prompt": "Translate from English to French.\\n\\n"}

Blank lines and lines that begin with `#` are skipped.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shared.api import ApiError, parse_tokenize
from shared.prompts import ChatPrompt, PromptEncoder, PromptError

__all__ = ["PublicPromptsError", "read_public_prompts"]


class PublicPromptsError(Exception):
    """The file cannot be used. One line, which names it and the line at fault."""


def read_public_prompts(path: Path, encoder: PromptEncoder) -> list[list[int]]:
    """Token ids of the registered beginnings. Of messages, what their template writes before an answer would begin."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PublicPromptsError(f"{path}: cannot be read: {error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            prompt = parse_tokenize(line.encode()).prompt
            if isinstance(prompt, ChatPrompt):
                prompt = msgspec.structs.replace(prompt, add_generation_prompt=False, continue_final_message=False)
            prompts.append(encoder.encode(prompt).token_ids)
        except (ApiError, PromptError) as error:
            raise PublicPromptsError(f"{path}, line {number}: {error}") from error
    return prompts
