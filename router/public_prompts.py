"""What tenants share, as replicas know it: the operator's file, read with the encoder of each model that is served.

The file is read again when it changes; one that cannot be used leaves what was public before. It must be that of the
replicas, or what is public is predicted where it is not held: they take a new one when they are restarted.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path

from router.file_watch import FileWatch
from router.fleet import Namespace
from shared.public_prefixes import PublicPrefixes
from shared.public_prompts import (
    PublicPrompt,
    PublicPromptsError,
    encode_public_prompts,
    read_public_prompts,
)
from shared.telemetry import fields

__all__ = ["PublicPrompts"]

_MOST_MODELS = 64

_logger = logging.getLogger(__name__)


class PublicPrompts:
    """The prompts of one file."""

    def __init__(self, path: Path, secret: str) -> None:
        """Raises PublicPromptsError."""
        self._path = path
        self._secret = secret
        self._watch = FileWatch(path)
        self._prompts = read_public_prompts(path)
        self._prefixes: OrderedDict[Namespace, PublicPrefixes] = OrderedDict()
        """Of the models asked for, the last one last."""

    def of(self, namespace: Namespace) -> PublicPrefixes:
        """The prefixes of a model: none while its encoder is not there, or where its template refuses one of them."""
        prefixes = self._prefixes.get(namespace)
        if prefixes is None:
            try:
                prefixes = self._encoded(namespace, self._prompts)
            except PublicPromptsError as error:
                _logger.error("nothing is taken for public: --public-prefixes %s", error)
                prefixes = self._encoded(namespace, [])
            self._prefixes[namespace] = prefixes
            if len(self._prefixes) > _MOST_MODELS:
                self._prefixes.popitem(last=False)
        return prefixes

    def reload(self) -> None:
        """Take what the file says now; where that cannot be used, keep what is public."""
        try:
            prompts = read_public_prompts(self._path)
            prefixes = OrderedDict((model, self._encoded(model, prompts)) for model in self._prefixes)
        except PublicPromptsError as error:
            _logger.warning("what is public stays as it was: --public-prefixes %s", error)
        else:
            self._prompts, self._prefixes = prompts, prefixes
            _logger.info("public prompts read", extra=fields(prompts=len(prompts)))

    async def watch(self) -> None:
        """Reload whenever the file has changed, until cancelled."""
        await self._watch.run(self.reload)

    def _encoded(self, namespace: Namespace, prompts: list[PublicPrompt]) -> PublicPrefixes:
        encoder = namespace.encoder
        token_ids = [] if encoder is None else encode_public_prompts(prompts, encoder)
        return PublicPrefixes(namespace.fingerprint, namespace.block_size, self._secret, token_ids)
