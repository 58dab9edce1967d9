"""One real Redis server for the whole run; each test that asks for it finds it empty."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import redis

from shared.embedded_redis import start

# How long an example takes says how busy the machine is, not whether the code is right: speed is proved in benches.
hypothesis.settings.register_profile(
    "warmroute", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("warmroute")


@pytest.fixture(scope="session")
def redis_server_url() -> Iterator[str]:
    """Always a server of our own: tests flush it, so one that REDIS_URL names is never touched."""
    with start() as server:
        yield server.url


@pytest.fixture
def redis_url(redis_server_url: str) -> str:
    with redis.Redis.from_url(redis_server_url) as client:
        client.flushall()
    return redis_server_url
