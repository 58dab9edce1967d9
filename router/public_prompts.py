"""What tenants share, as replicas know it: the operator's file, read with the encoder of each model that is served."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path

from router.fleet import Namespace
from shared.public_prefixes import PublicPrefixes
from shared.public_prompts import PublicPromptsError, read_public_prompts

__all__ = ["PublicPrompts"]

_MOST_MODELS = 64

_logger = logging.getLogger(__name__)


class PublicPrompts:
    """The router's file must be that of the replicas, or what is public is predicted where it is not held."""

    def __init__(self, path: Path, secret: str) -> None:
        self._path = path
        self._secret = secret
        self.of = lru_cache(_MOST_MODELS)(self._read)
        """The prefixes of a model whose encoder is there; read once for each."""

    def _read(self, namespace: Namespace) -> PublicPrefixes:
        prompts: list[list[int]] = []
        if namespace.encoder is not None:
            try:
                prompts = read_public_prompts(self._path, namespace.encoder)
            except PublicPromptsError as error:
                _logger.error("nothing is taken for public: --public-prefixes %s", error)
        return PublicPrefixes(namespace.fingerprint, namespace.block_size, self._secret, prompts)
