"""TLS on both sides of the router, with authorities made for the test."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import trustme
from aiohttp import web

from router.app import Router
from router.tls import ServerTls, TlsError, replica_context
from shared.settings import RouterSettings, SettingsError
from tests.helpers import eventually
from tests.router.conftest import BenchFactory, chat
from tests.router.fake_replica import MODEL
from tests.router.test_app import program, ready_url


class Files:
    """A certificate and its key in two files, and who made them."""

    def __init__(self, folder: Path) -> None:
        self.certificate, self.key = folder / "certificate.pem", folder / "key.pem"
        self.renew()

    def renew(self) -> None:
        """Another certificate, by another authority."""
        self.authority = trustme.CA()
        issued = self.authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(self.key)
        self.certificate.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))

    def believing(self) -> ssl.SSLContext:
        """What a client of the authority has."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def believed(url: str, context: ssl.SSLContext) -> bool:
    """By a new connection."""
    try:
        async with aiohttp.ClientSession() as client, client.get(url + "/health", ssl=context) as response:
            return response.status == 200
    except aiohttp.ClientConnectorCertificateError:
        return False


@pytest.mark.parametrize("stream", [True, False])
async def test_clients_are_answered_over_tls(bench: BenchFactory, files: Files, stream: bool) -> None:
    b = await bench(1, tls_certificate=str(files.certificate), tls_key=str(files.key))
    assert b.router.url.startswith("https://127.0.0.1:")
    async with b.client.post(b.url, json=chat(stream=stream), ssl=files.believing()) as response:
        assert response.status == 200
        assert await response.read()
    await b.settled()


async def test_a_renewed_certificate_is_taken_while_serving(bench: BenchFactory, files: Files) -> None:
    b = await bench(1, tls_certificate=str(files.certificate), tls_key=str(files.key))
    old = files.believing()
    files.renew()
    new = files.believing()
    async with asyncio.timeout(10):
        while not await believed(b.router.url, new):
            pass
    assert not await believed(b.router.url, old)


async def test_files_that_do_not_belong_together_leave_the_old_certificate(
    bench: BenchFactory, files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    b = await bench(1, tls_certificate=str(files.certificate), tls_key=str(files.key))
    (tmp_path / "other").mkdir()
    files.key.write_bytes(Files(tmp_path / "other").key.read_bytes())
    with caplog.at_level(logging.ERROR):
        b.router.reload()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["the certificate stays as it was"]
    assert await believed(b.router.url, files.believing())


def _missing(files: Files) -> None:
    files.key.unlink()


def _no_pem(files: Files) -> None:
    files.certificate.write_text("nothing")


@pytest.mark.parametrize("spoil", [_missing, _no_pem])
def test_unusable_files_are_one_clear_line(files: Files, spoil: Callable[[Files], None]) -> None:
    spoil(files)
    with pytest.raises(TlsError, match="are no certificate chain with its key"):
        ServerTls(files.certificate, files.key)
    with program("--port", "0", "--tls-certificate", str(files.certificate), "--tls-key", str(files.key)) as process:
        out, log = process.communicate(timeout=10)
        assert (process.returncode, out, log.count("\n")) == (2, "", 1)


def test_authorities_must_be_a_file_of_certificates(files: Files, tmp_path: Path) -> None:
    for path in (files.key, tmp_path / "none.pem"):
        with pytest.raises(TlsError, match="holds no certificates of authorities"):
            replica_context(path)


def test_a_certificate_needs_its_key() -> None:
    with pytest.raises(SettingsError, match="give both or neither"):
        RouterSettings(tls_certificate="certificate.pem")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_ready_line_says_https_and_sighup_renews(files: Files, workers: str) -> None:
    flags = (
        "--port",
        "0",
        "--workers",
        workers,
        "--tls-certificate",
        str(files.certificate),
        "--tls-key",
        str(files.key),
    )
    with program(*flags) as process:
        url = ready_url(process)
        assert url.startswith("https://")
        process.send_signal(signal.SIGHUP)
        assert asyncio.run(believed(url, files.believing()))
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=10)
        assert process.returncode == 0
        assert log.count("certificate read") == int(workers)


@asynccontextmanager
async def tls_replica(files: Files) -> AsyncIterator[str]:
    """Its URL."""

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.json_response({"data": [{"id": MODEL}], "object": "answer"})

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_replica_is_reached_over_tls_when_its_authority_is_believed(files: Files, tmp_path: Path) -> None:
    authority = tmp_path / "authority.pem"
    files.authority.cert_pem.write_to_path(authority)
    async with tls_replica(files) as url:
        settings = RouterSettings(port=0, redis=None, replica=(url,), tls_ca=str(authority))
        async with Router(settings) as router, aiohttp.ClientSession() as client:
            await eventually(lambda: all(router.health.reachable(r.id) and r.model for r in router.fleet))
            async with client.post(router.url + "/v1/chat/completions", json=chat(stream=False)) as response:
                assert (response.status, (await response.json())["object"]) == (200, "answer")


async def test_a_replica_of_an_unknown_authority_is_never_asked(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    async with tls_replica(files) as url:
        with caplog.at_level(logging.WARNING):
            async with Router(RouterSettings(port=0, redis=None, replica=(url,))) as router:
                await eventually(lambda: caplog.records, what="the probe's failure told")
                assert not any(router.health.reachable(replica.id) for replica in router.fleet)
        said = [str(vars(record)) for record in caplog.records]
        assert any("its certificate is not believed" in line and "--tls-ca" in line for line in said), said
