"""TLS towards clients: the certificate and key of this router, read again when their files change.

The one context lives as long as the router: new connections get the new certificate, those that are open go on. Files
that cannot be used, or not together (one is replaced a moment before the other), leave what was valid before.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from router.file_watch import FileWatch

__all__ = ["ServerTls", "TlsError", "replica_context"]

_logger = logging.getLogger(__name__)


class TlsError(Exception):
    """A file cannot be used. One line, which says what to change."""


class ServerTls:
    """`context` is what the server listens with."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises TlsError."""
        self._certificate = certificate
        self._key = key
        self._watch = FileWatch(certificate, key)
        self.context = self._fresh()

    def reload(self) -> None:
        """Take the files' certificate and key; where they cannot be used, keep the ones there are."""
        try:
            self._fresh()  # a context that fails halfway is spoilt: try them on another one
            self._load(self.context)
        except TlsError as error:
            _logger.error("the certificate stays as it was: %s", error)
        else:
            _logger.info("certificate read")

    async def watch(self) -> None:
        """Reload whenever a file has changed, until cancelled."""
        await self._watch.run(self.reload)

    def _fresh(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            # An empty password: a key that needs one is an error, not a question on the terminal.
            context.load_cert_chain(self._certificate, self._key, password="")
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or "no PEM"
            raise TlsError(
                f"{self._certificate} and {self._key} are no certificate chain with its key, in PEM and without a "
                f"password ({reason})"
            ) from None


def replica_context(authorities: Path | None) -> ssl.SSLContext:
    """For `https://` replicas: certificates and names are verified, by the system's authorities or those of a file.

    Raises TlsError.
    """
    try:
        return ssl.create_default_context(cafile=authorities)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or "no PEM"
        raise TlsError(f"{authorities} holds no certificates of authorities in PEM ({reason})") from None
