"""Whatever is sent, the answer is the replica's or an API error, and the router goes on."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.api import GENERATION_PATHS
from tests.router.conftest import Bench, BenchFactory, chat
from tests.router.fake_replica import refuse

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner))
FIELDS = ("model", "messages", "prompt", "stream", "max_tokens", "system", "tools", "user", "prompt_cache_key")


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    if draw(st.booleans()):
        return draw(st.binary(max_size=200))
    document: dict[str, Any] = chat(draw(st.booleans()), max_tokens=5)
    for field in draw(st.lists(st.sampled_from(FIELDS), max_size=3)):
        document[field] = draw(VALUES)
    return json.dumps(document).encode()


async def test_no_body_breaks_the_router(bench: BenchFactory) -> None:
    b = await bench(1)
    b.replicas[0].behave = refuse(200)
    examples: list[tuple[str, bytes]] = []

    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(path=st.sampled_from([*GENERATION_PATHS, "/route", "/tokenize", "/v1/other"]), body=bodies())
    def collect(path: str, body: bytes) -> None:
        examples.append((path, body))

    collect()
    for path, body in examples:
        await _check(b, path, body)
    await b.settled()


async def _check(b: Bench, path: str, body: bytes) -> None:
    async with b.client.post(b.router.url + path, data=body) as response:
        answer = await response.read()
    assert response.status < 500, (path, body, answer)
    if response.status != 200:
        error = json.loads(answer)["error"]
        assert error["message"], (path, body)
        assert error["code"], (path, body)
