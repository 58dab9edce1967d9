"""The replica's backend as a bench wants it: so many blocks, and a clock of its own where it is simulated."""

from __future__ import annotations

from dataclasses import replace

from replica.backend import Backend, load_backend
from replica.simulated_runner import SimulatedRunner
from shared.settings import BenchSettings, ReplicaSettings

__all__ = ["bench_backend"]


def bench_backend(settings: BenchSettings, blocks: int, host_blocks: int = 0) -> Backend:
    """With the runner that the settings name; a simulated one takes no real time."""
    block_size = settings.block_size
    backend = load_backend(
        ReplicaSettings(
            engine=settings.engine,
            model=settings.model,
            device=settings.device,
            dtype=settings.dtype,
            threads=settings.threads,
            block_size=block_size,
            blocks=blocks,
            host_blocks=host_blocks,
        )
    )
    if settings.engine != "sim":
        return backend
    return replace(backend, runner=SimulatedRunner(blocks, block_size, virtual=True, host_blocks=host_blocks))
