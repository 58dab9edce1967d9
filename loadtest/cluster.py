"""A cluster to compare on: Redis and replicas that stay, and a router that is new for every run.

All policies meet the same replicas, one after the other; `make_cold` takes from them what the last one left.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, TextIO
from urllib.request import Request, urlopen

import msgspec

from loadtest.chat_client import ChatClient, ChatRequest, RequestFailedError
from loadtest.peers import Peer, running_peer
from loadtest.plans import replica_flags
from loadtest.workloads import Message
from shared.embedded_redis import find_or_start
from shared.fleet_records import ReplicaRecord
from shared.fleet_state import FleetState
from shared.prompts import ChatPrompt, PromptEncoder, TokenizerBundle
from shared.settings import CompareSettings
from shared.supervisor import Child, Program, stop_all

__all__ = ["Cluster", "ClusterError", "running_cluster"]

_READY_SECONDS = 300.0
_SETTLE_SECONDS = 30.0
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.05
_HTTP_SECONDS = 30.0
_UNSIGNED = {"WARMROUTE_SECRET": ""}
"""The cluster is our own, and we read what it publishes: no secret of another one applies."""
_WARM_UP = ChatRequest(model="", messages=[{"role": "user", "content": "warm up " * 64}], max_tokens=4)


class ClusterError(Exception):
    """The cluster does not do what a comparison needs. The message says what."""


@dataclass(frozen=True, slots=True)
class Cluster:
    replicas: dict[str, Child]
    urls: dict[str, str]
    model: str
    block_size: int
    capacity_blocks: int
    context_tokens: int
    encoder: PromptEncoder
    """Renders and tokenizes as the replicas do."""
    common_flags: tuple[str, ...]
    log: TextIO

    @contextmanager
    def router(self, policy: str) -> Iterator[str]:
        """The URL of a fresh router that knows all replicas, in front of cold ones."""
        program = Program("router", ("router", "--port", "0", "--policy", policy, *self.common_flags), _UNSIGNED)
        with _running([program], self.log) as [router]:
            url = router.wait_ready(_READY_SECONDS)
            self._wait_for_view(url, lambda seen: True, "see every replica")
            self._make_cold(url)
            yield url

    @contextmanager
    def peer(self, peer: Peer) -> Iterator[str]:
        """The URL of that router, freshly started in front of the same replicas, cold. Raises PeerError."""
        with running_peer(peer.command, list(self.urls.values()), self.log) as (url, _):
            _wait(lambda: self._is_answered(url), f"{peer.name} does not answer a request")
            self._empty_caches()
            yield url

    def encode_prompt(self, messages: list[Message]) -> Sequence[int]:
        """The ids that the engine sees. Raises PromptError."""
        return self.encoder.encode(ChatPrompt(messages)).token_ids

    def encode_answer(self, text: str) -> Sequence[int]:
        return self.encoder.tokenizer.encode(text, add_special_tokens=False).ids

    def busy_seconds(self) -> dict[str, float]:
        """Processor time of each replica so far; empty where the system does not tell."""
        return {name: seconds for name, child in self.replicas.items() if (seconds := _cpu_seconds(child.pid))}

    def _make_cold(self, router_url: str) -> None:
        """One request each way, so that nothing is done for the first time later; then empty every cache."""
        for url in [*self.urls.values(), router_url]:
            try:
                self._ask(url)
            except RequestFailedError as failure:
                raise ClusterError(f"{url} does not answer the warm-up request: {failure}") from failure
        self._empty_caches()
        self._wait_for_view(router_url, lambda seen: seen["blocks"] == 0, "see every cache empty")

    def _ask(self, url: str) -> None:
        body = msgspec.json.encode(msgspec.structs.replace(_WARM_UP, model=self.model))
        ChatClient(url, _SETTLE_SECONDS).ask(body)

    def _is_answered(self, url: str) -> bool:
        """Raises OSError where it is not, so that whoever waits can tell why."""
        try:
            self._ask(url)
        except RequestFailedError as failure:
            raise OSError(str(failure)) from None
        return True

    def _empty_caches(self) -> None:
        for name, url in self.urls.items():
            _wait(partial(_is_empty_after_reset, url), f"{name} does not empty its cache")

    def _wait_for_view(self, router_url: str, fits: Callable[[dict[str, Any]], bool], what: str) -> None:
        def seen() -> bool:
            listed = _get(f"{router_url}/replicas")["replicas"]
            fitting = {each["id"] for each in listed if each["state"] == "accepting" and fits(each)}
            return fitting >= self.replicas.keys()

        _wait(seen, f"the router does not {what}")


@contextmanager
def running_cluster(settings: CompareSettings, log: TextIO) -> Iterator[Cluster]:
    """What the programs say goes to `log`. Raises ClusterError, EmbeddedRedisError or ChildFailedError."""
    ids = [f"replica-{n + 1}" for n in range(settings.replicas)]
    with find_or_start(settings.redis) as redis:
        name = f"compare-{os.getpid()}"
        common = ("--redis", redis.url, "--cluster", name, "--log-level", settings.log_level)
        flags = ("replica", "--port", "0", *common, *replica_flags(settings))
        with _running([Program(each, (*flags, "--id", each), _UNSIGNED) for each in ids], log) as children:
            urls = {each: child.wait_ready(_READY_SECONDS) for each, child in zip(ids, children, strict=True)}
            record, bundle = asyncio.run(_published(FleetState(redis.url, name), ids))
            yield Cluster(
                dict(zip(ids, children, strict=True)),
                urls,
                record.model,
                record.block_size,
                record.capacity_blocks,
                _get(f"{urls[ids[0]]}/v1/models")["data"][0]["max_model_len"],
                PromptEncoder(bundle),
                common,
                log,
            )


@contextmanager
def _running(programs: Iterable[Program], log: TextIO) -> Iterator[list[Child]]:
    children: list[Child] = []
    try:
        for program in programs:
            children.append(Child(program, log))  # noqa: PERF401 (those that did start are stopped)
        yield children
    finally:
        stop_all(children, _STOP_SECONDS)


async def _published(state: FleetState, ids: list[str]) -> tuple[ReplicaRecord, TokenizerBundle]:
    """What the first replica says of itself, once all have spoken, and its tokenizer."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    try:
        while time.monotonic() < deadline:
            records = await state.records(ids)
            packed = await state.get_tokenizer(records[ids[0]].tokenizer) if len(records) == len(ids) else None
            if packed is not None:
                return records[ids[0]], TokenizerBundle.unpack(packed)
            await asyncio.sleep(_POLL_SECONDS)
    finally:
        await state.close()
    raise ClusterError(f"not every replica has published itself to Redis within {_SETTLE_SECONDS:g} s")


def _is_empty_after_reset(url: str) -> bool:
    with urlopen(Request(f"{url}/reset_prefix_cache", method="POST"), timeout=_HTTP_SECONDS):  # noqa: S310 (ours)
        pass
    cache = _get(f"{url}/cache")
    return bool(cache["cached_blocks"] == cache["used_blocks"] == 0)


def _get(url: str) -> Any:
    with urlopen(url, timeout=_HTTP_SECONDS) as response:  # noqa: S310 (a server of our own)
        return json.load(response)


def _wait(reached: Callable[[], bool], otherwise: str) -> None:
    """Raises ClusterError `otherwise`, with the last reason, when the condition is not met in time."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    reason = ""
    while time.monotonic() < deadline:
        try:
            if reached():
                return
        except (OSError, HTTPException, ValueError) as error:
            reason = f": {error}"
        time.sleep(_POLL_SECONDS)
    raise ClusterError(f"{otherwise} within {_SETTLE_SECONDS:g} s{reason}")


def _cpu_seconds(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
