"""Sessions of a real model: exactly the same numbers, or nearly the same and how nearly."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replica.guests import Guests
from replica.kv_layout import KVLayout, UnsupportedEncoding, encoding_of
from replica.runner import Chunk
from replica.sequence import Sequence
from tests.replica.session_client import STORY, cached, call, process, refused
from tests.replica.sim_server import CHAT, HELLO, serving

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'warmroute[engine]'")

from tests.replica import tiny_zoo  # noqa: E402

TELL: dict[str, Any] = STORY | {"temperature": 0, "max_tokens": 24}


async def tell(client: Any) -> tuple[str, int, int]:
    answer = await call(client, "POST", CHAT, json=TELL)
    usage = answer["usage"]
    text = answer["choices"][0]["message"]["content"]
    return text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


async def test_a_real_models_sessions_survive_kill_9(tmp_path: Path) -> None:
    flags = ("--engine", "torch", "--threads", "1", "--blocks", "128", "--sessions", str(tmp_path))
    async with process(*flags) as (child, client):
        text, prompt_tokens, _ = await tell(client)
        for kv in ("raw", "int8"):
            assert (await call(client, "POST", f"/sessions/{kv}/save?kv={kv}", json=TELL))["kv"] == kv
        child.send_signal(signal.SIGKILL)
        await child.wait()
    async with process(*flags) as (_, client):
        for kv in ("int8", "raw"):
            await call(client, "POST", "/reset_prefix_cache")
            await call(client, "POST", f"/sessions/{kv}/restore")
            again, _, cached_tokens = await tell(client)
            assert cached_tokens == cached(prompt_tokens)
        assert again == text


async def test_rounded_blocks_never_stand_for_what_all_tenants_share(tmp_path: Path) -> None:
    system = {"role": "system", "content": "you are a guide to the river " * 8}
    public = tmp_path / "public.jsonl"
    public.write_text(json.dumps({"messages": [system]}))
    body = HELLO | {"messages": [system, {"role": "user", "content": "to the sea " * 8}]}
    mine, theirs = {"x-warmroute-tenant": "mine"}, {"x-warmroute-tenant": "theirs"}
    flags: dict[str, Any] = {"engine": "torch", "threads": 1, "blocks": 64, "public_prefixes": str(public)}
    async with serving(**flags, sessions=str(tmp_path / "sessions")) as (_, client):
        await call(client, "POST", CHAT, json=body, headers=mine)
        await call(client, "POST", "/sessions/one/save?kv=int8", json=body, headers=mine)
        await call(client, "POST", "/reset_prefix_cache")
        message = await refused(client, "POST", "/sessions/one/restore", 409, "session_mismatch", headers=mine)
        assert "all tenants share" in message
        assert (await call(client, "GET", "/cache"))["held_blocks"] == 0
        await call(client, "POST", CHAT, json=body, headers=theirs)
        assert (await call(client, "POST", "/sessions/one/restore", headers=mine))["written_blocks"]


class Engine(tiny_zoo.SmallEngine):
    def __init__(self, family: str, dtype: Any = torch.float32) -> None:
        model = tiny_zoo.build(family)
        torch.nn.Module.to(model, dtype=dtype)
        super().__init__(model, block_size=4)
        self.guests = Guests(self.runner, self.scheduler, lambda: None)

    def saved(self, prompt: list[int]) -> tuple[list[int], memoryview]:
        guest = self.guests.hold(prompt, tiny_zoo.ROOT)
        assert guest is not None
        kv = self.guests.read(guest, 0, len(guest.block_ids))
        tokens = list(guest.tokens)
        self.guests.leave(guest)
        return tokens, kv

    def restore(self, tokens: list[int], kv: memoryview) -> None:
        guest = self.guests.expect(tokens, tiny_zoo.ROOT)
        self.guests.write(guest, 0, kv)
        self.guests.settle(guest)
        self.scheduler.check_integrity()

    def next_logits(self, prompt: list[int]) -> Any:
        """Of a prompt whose all but last tokens are in the cache."""
        sequence = tiny_zoo.make_sequence(prompt, 1)
        match = self.cache.match(sequence)
        assert self.cache.allocate(sequence, match)
        logits = self.runner.logits([Chunk(sequence, sequence.computed_tokens, len(prompt))])[0].float()
        assert sequence.computed_tokens == len(prompt) - 1
        self.cache.free(sequence)
        return logits


@pytest.mark.parametrize("family", tiny_zoo.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_raw_kv_comes_back_to_the_bit_and_answers_are_equal(family: str, dtype: Any) -> None:
    first, second = Engine(family, dtype), Engine(family, dtype)
    prompt = tiny_zoo.make_prompt(41)
    [answer] = first.run(tiny_zoo.make_sequence(prompt, 12))
    tokens, kv = first.saved(prompt)
    assert tokens == prompt[:40]
    second.run(tiny_zoo.make_sequence(tiny_zoo.make_prompt(30, seed=5), 3))  # block ids are not the same ones
    second.restore(tokens, kv)
    resumed = tiny_zoo.make_sequence(prompt, 12)
    assert torch.equal(second.next_logits(prompt), first.next_logits(prompt))
    assert second.run(resumed) == [answer]
    assert resumed.cached_tokens == 40
    assert bytes(second.saved(prompt)[1]) == bytes(kv)


@pytest.mark.parametrize("family", tiny_zoo.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_int8_kv_changes_logits_by_little(family: str, dtype: Any) -> None:
    first, second = Engine(family, dtype), Engine(family, dtype)
    prompt = tiny_zoo.make_prompt(41)
    first.run(tiny_zoo.make_sequence(prompt, 12))
    tokens, kv = first.saved(prompt)
    int8 = encoding_of("int8", first.runner.kv_layout)
    stored = int8.encode(kv)
    assert len(stored) == 10 * int8.stored_block_bytes
    second.restore(tokens, int8.decode(stored))
    exact, rounded = first.next_logits(prompt), second.next_logits(prompt)
    difference = float((rounded - exact).square().mean().sqrt() / exact.std())
    assert 0 < difference < 0.05  # seen: 0.01 to 0.03


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_no_number_is_off_by_more_than_half_a_step_of_its_vector(name: str) -> None:
    dtype = getattr(torch, name)
    layout = KVLayout(
        dtype=name,
        layers=3,
        kv_heads=2,
        head_dim=8,
        block_size=4,
        rope="",
        block_bytes=3 * 2 * 2 * 8 * 4 * dtype.itemsize,
    )
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn(5, 3, 2, 2, 4, 8, generator=generator)
    kv *= torch.logspace(-6, 3, 5 * 12).view(5, 3, 2, 2, 1, 1)  # of very different sizes
    kv[0, 0] = 0
    kv = kv.to(dtype)
    int8 = encoding_of("int8", layout)
    assert int8.stored_block_bytes == 3 * 2 * 2 * 4 * (4 + 8)
    raw = kv.view(torch.uint8).numpy().data.cast("B")
    back = torch.frombuffer(int8.decode(int8.encode(raw)), dtype=dtype).view(kv.shape)
    steps = kv.float().abs().amax(-1, keepdim=True) / 127
    rounding = kv.float().abs() * torch.finfo(dtype).eps + torch.finfo(dtype).tiny  # of the number format itself
    assert bool(((back.float() - kv.float()).abs() <= 0.5 * steps * 1.001 + rounding).all())
    assert not bool(back[0, 0].any())


def test_numbers_that_are_not_finite_are_refused_by_int8() -> None:
    layout = msgspec.structs.replace(Engine("llama").runner.kv_layout, dtype="float32")
    for value in (float("inf"), float("nan")):
        kv = torch.full((layout.block_bytes // 4,), value)
        with pytest.raises(UnsupportedEncoding, match="not finite"):
            encoding_of("int8", layout).encode(kv.view(torch.uint8).numpy().data)


def test_slots_that_were_not_computed_leave_as_zeros() -> None:
    engine = Engine("llama")
    engine.run(tiny_zoo.make_sequence(tiny_zoo.make_prompt(120), 100))  # has written to most blocks
    sequence: Sequence = tiny_zoo.make_sequence(tiny_zoo.make_prompt(10, seed=2))
    assert engine.cache.allocate(sequence, engine.cache.match(sequence))
    engine.runner.logits([Chunk(sequence, 0, 6)])
    sequence.computed_tokens = 6
    layout = engine.runner.kv_layout
    kv = torch.frombuffer(engine.runner.read_blocks(sequence, 0, 3), dtype=torch.float32)
    kv = kv.view(3, layout.layers, 2, layout.kv_heads, 4, layout.head_dim)
    assert bool(kv[0].all())
    assert bool(kv[1, :, :, :, :2].all())
    assert not bool(kv[1, :, :, :, 2:].any())
    assert not bool(kv[2].any())


def test_the_layout_tells_what_must_be_equal() -> None:
    llama, gpt2 = (Engine(family).runner.kv_layout for family in ("llama", "gpt2"))
    assert (llama.dtype, llama.layers, llama.kv_heads, llama.head_dim, llama.block_size) == ("float32", 3, 2, 16, 4)
    assert "rope_theta" in llama.rope
    assert gpt2.rope == ""
    assert llama.block_bytes == 3 * 2 * 2 * 4 * 16 * 4
