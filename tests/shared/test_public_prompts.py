"""The file of what tenants share: what is in it, and where it is at fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from replica.tiny_tokenizer import tiny_bundle
from shared.prompts import PromptEncoder
from shared.public_prompts import PublicPromptsError, encode_public_prompts, read_public_prompts

GOOD = '{"messages": [{"role": "system", "content": "You are helpful."}]}'


def test_lines_are_bodies_and_others_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "public"
    path.write_text(f'# shared by all\n\n{GOOD}\r\n{{"prompt": "a line\u2028 separator"}}\n', encoding="utf-8")
    prompts = read_public_prompts(path)
    assert [prompt.source for prompt in prompts] == [f"{path}, line 3", f"{path}, line 4"]
    encoder = PromptEncoder(tiny_bundle())
    chat, text = encode_public_prompts(prompts, encoder)
    assert encoder.decode(text) == "a line\u2028 separator"
    assert "assistant" not in encoder.decode(chat), "it ends before an answer would begin"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"nonsense", "line 1: "),
        (GOOD.encode() + b'\n{"messages": 1}', "line 2: "),
        (b"{}", "line 1: .*messages or prompt"),
        (b"[1]", "line 1: "),
        (b"\xff", "is not UTF-8"),
        (b"#" * (2**24 + 1), "is over 16777216 bytes"),
    ],
)
def test_a_malformed_file_says_where(tmp_path: Path, text: bytes, fault: str) -> None:
    path = tmp_path / "public"
    path.write_bytes(text)
    with pytest.raises(PublicPromptsError, match=fault) as caught:
        read_public_prompts(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing", "."])
def test_no_file_is_one_line_too(tmp_path: Path, name: str) -> None:
    with pytest.raises(PublicPromptsError, match=r"cannot be read: (No such file|Is a directory)"):
        read_public_prompts(tmp_path / name)
