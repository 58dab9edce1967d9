"""Clients that do not get through their TLS handshake, or take their time; and certificates of replicas."""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from router.client_connection import MOST_REFUSED
from router.tls import replica_context
from router.upstream import Upstream, UpstreamError
from tests.helpers import eventually
from tests.router.conftest import Bench, BenchFactory
from tests.router.test_app import program, ready_url
from tests.router.test_tls import Files, believed, tls_replica

CLIENT_HELLO_HALF = bytes.fromhex("160301020001000001fc0303") + b"x" * 20


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def over_tls(bench: BenchFactory, files: Files, **settings: Any) -> Bench:
    return await bench(1, tls_certificate=str(files.certificate), tls_key=str(files.key), **settings)


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("https://").split(":")
    return host, int(port)


async def said_to(url: str, sent: bytes) -> bytes:
    """All that comes back until the other side hangs up."""
    reader, writer = await asyncio.open_connection(*address(url))
    try:
        writer.write(sent)
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    return await asyncio.wait_for(reader.readuntil(b"ok"), 10)


@pytest.mark.parametrize(
    "sent",
    [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 50, b"SSH-2.0-OpenSSH_9.0\r\n"],
    ids=["plain HTTP", "zeros", "SSH"],
)
async def test_what_is_not_tls_is_hung_up_on_and_told_of_in_the_log(
    bench: BenchFactory, files: Files, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    b = await over_tls(bench, files)
    with caplog.at_level(logging.INFO, "router.client_server"):
        answer = await said_to(b.router.url, sent)
        assert b"HTTP" not in answer
        assert len(answer) < 10, "an alert at most"
        await eventually(lambda: caplog.records, what="the failure told")
    (record,) = caplog.records
    assert record.getMessage() == "a TLS handshake failed"
    assert vars(record)["fields"]["reason"]
    assert await believed(b.router.url, files.believing())


async def test_a_protocol_that_is_too_old_is_refused(bench: BenchFactory, files: Files) -> None:
    b = await over_tls(bench, files)
    old = files.believing()
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection(*address(b.router.url), ssl=old)


@pytest.mark.parametrize("sent", [b"", CLIENT_HELLO_HALF], ids=["silence", "half a hello"])
async def test_a_handshake_that_does_not_go_on_is_given_up_in_its_own_time(
    bench: BenchFactory, files: Files, sent: bytes
) -> None:
    b = await over_tls(bench, files, tls_handshake_timeout_seconds=0.3, head_timeout_seconds=60.0)
    assert await said_to(b.router.url, sent) == b""


async def test_a_head_that_comes_slowly_over_tls_is_a_408(bench: BenchFactory, files: Files) -> None:
    b = await over_tls(bench, files, head_timeout_seconds=0.3)
    reader, writer = await asyncio.open_connection(*address(b.router.url), ssl=files.believing())
    writer.write(b"GET /hea")
    assert b"408 Request Timeout" in await asyncio.wait_for(reader.read(), 10)
    writer.close()


async def test_handshakes_take_places_and_give_them_back(bench: BenchFactory, files: Files) -> None:
    b = await over_tls(bench, files, max_connections=2, tls_handshake_timeout_seconds=5.0)
    context = files.believing()
    async with AsyncExitStack() as stack:

        async def connect(tls: ssl.SSLContext | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(*address(b.router.url), ssl=tls)
            stack.callback(writer.close)
            return reader, writer

        served = await connect(context)
        assert b"200 OK" in await asked(*served)
        stuck = [await connect() for _ in range(1 + MOST_REFUSED)]
        one_more, _ = await connect()
        assert await asyncio.wait_for(one_more.read(), 3) == b"", "hung up on before any handshake could time out"
        assert b"200 OK" in await asked(*served), "who has a place keeps it"
        for reader, _ in stuck:
            assert await asyncio.wait_for(reader.read(), 10) == b""
        second = await connect(context)
        assert b"200 OK" in await asked(*second)
        told, _ = await connect(context)
        assert b"too_many_connections" in await asyncio.wait_for(told.read(), 10)


async def test_a_client_that_hangs_up_during_its_handshake_gives_its_place_back(
    bench: BenchFactory, files: Files
) -> None:
    b = await over_tls(bench, files, max_connections=1, tls_handshake_timeout_seconds=60.0)
    for _ in range(2 * MOST_REFUSED):
        _, writer = await asyncio.open_connection(*address(b.router.url))
        writer.write(CLIENT_HELLO_HALF)
        await writer.drain()
        writer.transport.abort()

    async def served() -> bool:
        try:
            return await believed(b.router.url, files.believing())
        except OSError:
            return False

    async with asyncio.timeout(10):
        while not await served():
            pass


async def test_open_connections_go_on_when_the_certificate_is_replaced(bench: BenchFactory, files: Files) -> None:
    b = await over_tls(bench, files)
    old = files.believing()
    reader, writer = await asyncio.open_connection(*address(b.router.url), ssl=old)
    assert b"200 OK" in await asked(reader, writer)
    files.renew()
    b.router.reload()
    assert await believed(b.router.url, files.believing())
    assert not await believed(b.router.url, old)
    assert b"200 OK" in await asked(reader, writer)
    writer.close()


async def test_the_program_itself_gives_up_handshakes_and_serves_on(files: Files) -> None:
    """It runs on another event loop than these tests do."""
    flags = ("--tls-certificate", str(files.certificate), "--tls-key", str(files.key))
    with program("--port", "0", *flags, "--tls-handshake-timeout-seconds", "0.3") as process:
        url = await asyncio.to_thread(ready_url, process)
        for sent in (b"", CLIENT_HELLO_HALF, b"GET / HTTP/1.1\r\n\r\n"):
            assert b"HTTP" not in await said_to(url, sent)
            assert await believed(url, files.believing())
        process.terminate()
        _, log = await asyncio.to_thread(process.communicate, None, 10)
        assert process.returncode == 0
        assert log.count("a TLS handshake failed") == 3
        assert "Traceback" not in log


@pytest.mark.parametrize(
    ("host", "believes", "reason"),
    [
        ("127.0.0.1", False, "unable to get local issuer certificate"),
        ("localhost", True, "Hostname mismatch"),
    ],
)
async def test_a_replica_with_the_wrong_certificate_is_not_sent_anything(
    files: Files, tmp_path: Path, host: str, believes: bool, reason: str
) -> None:
    authority = tmp_path / "authority.pem"
    files.authority.cert_pem.write_to_path(authority)
    context = replica_context(authority if believes else None)
    async with (
        tls_replica(files) as url,
        Upstream(
            connect_timeout_seconds=5.0,
            first_byte_timeout_seconds=5.0,
            chunk_timeout_seconds=5.0,
            request_timeout_seconds=5.0,
            tls=context,
        ) as upstream,
    ):
        with pytest.raises(UpstreamError, match="its certificate is not believed") as caught:
            await upstream.open("POST", url.replace("127.0.0.1", host), "/v1/x", b"", b"{}")
    assert (caught.value.failure, caught.value.sent) == ("unreachable", False)
    assert reason in str(caught.value)
    assert "--tls-ca" in str(caught.value)


async def test_a_replica_that_speaks_no_tls_is_unreachable_by_https(bench: BenchFactory) -> None:
    b = await bench(1)
    url = b.replicas[0].url.replace("http://", "https://")
    b.router.fleet.add_static(url)
    with pytest.raises(UpstreamError, match="it cannot be reached") as caught:
        await b.router._upstream.open("POST", url, "/v1/x", b"", b"{}")
    assert not caught.value.sent
