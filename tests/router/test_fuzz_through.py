"""Whatever body comes, a client of the router is answered as one of the replica: never refused by the router alone,
never with a 500, never not at all.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.app import Router
from shared.api import GENERATION_PATHS
from shared.settings import RouterSettings
from tests.helpers import eventually
from tests.replica.sim_server import serving

USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "system", "content": [{"type": "text", "text": "be brief"}]}, USER],
    "max_tokens": 3,
    "temperature": 0.5,
    "stream": False,
    "stop": ["x"],
    "logit_bias": {"5": 1},
    "tools": [TOOL],
    "prompt_cache_key": "k",
    "user": "u",
    "stream_options": {"include_usage": True},
}
MESSAGES: dict[str, Any] = {
    "model": "tiny",
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral", "ttl": "5m"}}],
    "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}, USER],
    "max_tokens": 3,
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
    "stream": True,
}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": ["hello"], "max_tokens": 3, "seed": 1, "n": 1, "stream": False}
BASES = dict(zip(GENERATION_PATHS, (CHAT, COMPLETION, MESSAGES), strict=True))

RAW = (
    *("null", "true", "0", "-1", "1e999", "-1e999", "NaN", "Infinity", "1" * 400, "-" + "9" * 400, "0.1", "1e-400"),
    *('""', '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\\u202e"', '"\ufeff"', '"' + "x" * 5000 + '"', '"tiny"'),
    *("[]", "{}", "[null]", "[[]]", '[""]', '[{"": null}]', '{"role": null}', '{"a":1,"a":2}', "[1,2,3]", "[-1]"),
    *("[" * 50 + "]" * 50, "[" * 20_000, "[" * 3_000 + "]" * 3_000, '{"a":' * 3_000 + "1" + "}" * 3_000),
    *("01", "1.", "+1", "'x'", "undefined", "1_000", "0x1", "// x", '"\t"', '"\\x41"', "[1,]", '{"a":1,}', ""),
)
"""JSON values, and what is none, as text."""
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container inside, with each of its keys or indexes."""
    for key in range(len(value)) if isinstance(value, list) else list(value):
        yield value, key
        if isinstance(value[key], list | dict):
            yield from places(value[key])


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path and a body that is right but for one to three places."""
    path = draw(st.sampled_from(GENERATION_PATHS))
    document = json.loads(json.dumps(BASES[path]))
    replaced: dict[str, str] = {}
    for number in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(list(places(document))))
        marker = f"@{number}@"
        container[key] = marker
        replaced[f'"{marker}"'] = draw(st.sampled_from(RAW) | VALUES.map(json.dumps))
    if draw(st.booleans()):
        document[draw(st.sampled_from(("n", "top_p", "thinking", "response_format", "tool_choice", "min_p")))] = draw(
            VALUES
        )
    text = json.dumps(document)
    for marker, raw in replaced.items():
        text = text.replace(marker, raw)
    if draw(st.integers(0, 9)) == 0:  # the same field twice
        text = text[:-1] + ', "model": "tiny", "messages": null}'
    body = text.encode(errors="surrogatepass")
    return path, draw(
        st.sampled_from((body, body, body, b"\xef\xbb\xbf" + body, body[:-1], body + body, b"\xff" + body))
    )


async def test_the_router_answers_every_body_as_the_replica_does(redis_url: str) -> None:
    examples: list[tuple[str, bytes]] = []

    @settings(max_examples=250, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(requests())
    def collect(example: tuple[str, bytes]) -> None:
        examples.append(example)

    collect()
    async with (
        serving(redis=redis_url, max_model_len=512, sim_base_seconds=0) as (server, replica),
        Router(RouterSettings(port=0, redis=redis_url)) as router,
        aiohttp.ClientSession(router.url, timeout=aiohttp.ClientTimeout(total=20)) as client,
    ):
        await eventually(lambda: any(each.encoder for each in router.fleet.namespaces("tiny")), what="a tokenizer")
        outcomes = set()
        for path, body in examples:
            (by_replica, _), (by_router, answer) = await asyncio.gather(
                asked(replica, path, body), asked(client, path, body)
            )
            # Where two things are wrong, each may see another one first.
            assert (by_router == 200) == (by_replica == 200), (path, body[:500], answer)
            assert max(by_router, by_replica) < 500, (path, body[:500], answer)
            outcomes.add(by_router)
        assert outcomes >= {200, 400}
        assert router.admission.in_flight == router.placement.ledger.total_active == 0
        assert server.service is not None
        assert server.service.engine.state().failed_steps == 0


async def asked(client: aiohttp.ClientSession, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and answer, which is an answer, or an error that programs and people understand."""
    async with client.post(path, data=body) as response:
        answer = await response.read()
    if response.status != 200:
        error = json.loads(answer)["error"]
        assert error["code"], (path, body)
        assert error["message"], (path, body)
        assert ("type" in json.loads(answer)) is (path == "/v1/messages")
    return response.status, answer


@pytest.mark.parametrize("path", GENERATION_PATHS)
@pytest.mark.parametrize("packed", [b"\x1f\x8b", b"not packed", b""])
async def test_a_body_that_only_claims_to_be_packed_is_told_so(redis_url: str, path: str, packed: bytes) -> None:
    async with (
        serving(redis=redis_url) as (_, replica),
        Router(RouterSettings(port=0, redis=redis_url)) as router,
        aiohttp.ClientSession(router.url) as client,
    ):
        await eventually(lambda: len(router.fleet) == 1, what="the replica known")
        for asking in (replica, client):
            async with asking.post(path, data=packed, headers={"Content-Encoding": "gzip"}) as response:
                assert (response.status, bool((await response.json())["error"]["message"])) == (400, True)
