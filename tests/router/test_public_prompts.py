"""What tenants share, as the router reads it: refused at the start where it is malformed, followed while it serves."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from replica.tiny_tokenizer import tiny_bundle
from router.fleet import Namespace
from router.public_prompts import PublicPrompts
from shared.prompts import PromptEncoder, TextPrompt
from shared.public_prompts import PublicPromptsError
from tests.helpers import eventually
from tests.router.conftest import BenchFactory
from tests.router.test_app import program, ready_url

ENCODER = PromptEncoder(tiny_bundle())
MODEL, UNKNOWN = Namespace("model", 4, 1000, ENCODER), Namespace("model", 4, 1000, None)
MANUAL, OTHER = "the manual of the machine says", "another text altogether is here"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "public"
    path.write_text(line(MANUAL))
    return path


def line(text: str) -> str:
    return f'{{"prompt": "{text}"}}\n'


def is_public(public: PublicPrompts, text: str, model: Namespace = MODEL) -> bool:
    return public.of(model).shared_blocks(ENCODER.encode(TextPrompt(text)).token_ids) > 0


def test_what_is_registered_is_public_once_the_models_encoder_is_there(file: Path) -> None:
    public = PublicPrompts(file, "secret")
    assert not is_public(public, MANUAL, UNKNOWN)
    assert is_public(public, MANUAL)
    assert not is_public(public, OTHER)


def test_a_changed_file_is_taken_and_a_broken_one_is_not(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    public = PublicPrompts(file, "secret")
    assert is_public(public, MANUAL)
    file.write_text(line(OTHER))
    public.reload()
    assert is_public(public, OTHER)
    assert not is_public(public, MANUAL)
    for broken in (line(MANUAL) + "nonsense", None):
        file.unlink() if broken is None else file.write_text(broken)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            public.reload()
        (record,) = caplog.records
        assert record.getMessage().startswith(f"what is public stays as it was: --public-prefixes {file}")
        assert is_public(public, OTHER)
        assert not is_public(public, MANUAL)


def test_a_line_that_the_template_refuses_takes_nothing_away(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    refused = '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}\n'
    public = PublicPrompts(file, "secret")
    assert is_public(public, MANUAL)
    file.write_text(line(OTHER) + refused)
    public.reload()
    assert is_public(public, MANUAL)
    assert "stays as it was" in caplog.text


async def test_a_serving_router_follows_the_file(bench: BenchFactory, file: Path) -> None:
    b = await bench(1, public_prefixes=str(file))
    public = b.router._public
    assert public is not None
    assert is_public(public, MANUAL)
    await asyncio.to_thread(file.write_text, line(OTHER))
    await eventually(lambda: is_public(public, OTHER), what="the new file taken")


@pytest.mark.parametrize("tier", ["router", "replica"])
@pytest.mark.parametrize(("text", "fault"), [("nonsense\n", "line 1: "), (None, "cannot be read: No such file")])
def test_neither_tier_starts_with_a_file_that_cannot_be_used(
    file: Path, tier: str, text: str | None, fault: str
) -> None:
    file.unlink() if text is None else file.write_text(text)
    command = [
        sys.executable,
        "-m",
        "warmroute",
        tier,
        "--redis",
        "none",
        "--port",
        "0",
        "--public-prefixes",
        str(file),
    ]
    command += ["--engine", "sim"] if tier == "replica" else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"warmroute {tier}: --public-prefixes {file}")
    assert fault in done.stderr


def test_the_error_is_the_files(tmp_path: Path) -> None:
    with pytest.raises(PublicPromptsError, match="cannot be read"):
        PublicPrompts(tmp_path, "")


def test_sighup_without_anything_to_reload_does_not_end_the_program() -> None:
    with program("--port", "0") as process:
        ready_url(process)
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        log = ""
        while "nothing to reload" not in log:
            log = process.stderr.readline()
            assert log, "it ended"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
