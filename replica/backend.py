"""What sits in the engine's seat, by `--engine`: a runner and what must be known of its model.

Loading takes seconds and more: call it in a thread. Torch is imported only where it is asked for.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from replica.runner import Runner
from replica.simulated_runner import SimulatedCost, SimulatedRunner
from shared.fleet_records import CostCoefficients
from shared.settings import ReplicaSettings
from shared.tokenizer_bundle import TokenizerBundle

__all__ = ["Backend", "BackendError", "load_backend", "simulated_cost"]

_SIMULATED_BLOCKS = 4096
_SIMULATED_CONTEXT_TOKENS = 16_384


class BackendError(Exception):
    """The engine can not be set up like this. One line for the user, which says what to change."""


@dataclass(frozen=True, slots=True)
class Backend:
    runner: Runner
    bundle: TokenizerBundle
    weights_id: str
    """Engines with equal ids compute equal KV."""
    context_tokens: int
    eos_token_ids: frozenset[int]
    replica_class: str
    """Replicas of one class take the same time for the same work."""
    cost: CostCoefficients | None = None
    """Where it is known beforehand."""


def load_backend(settings: ReplicaSettings) -> Backend:
    """Raises BackendError."""
    return _simulated(settings) if settings.engine == "sim" else _torch(settings)


def simulated_cost(settings: ReplicaSettings) -> SimulatedCost:
    """What a step takes with `--engine sim`."""
    return SimulatedCost(
        base_seconds=settings.sim_base_seconds,
        per_token_seconds=settings.sim_per_token_seconds,
        per_token_context_seconds=settings.sim_per_token_context_seconds,
        per_decode_seconds=settings.sim_per_decode_seconds,
    )


def _simulated(settings: ReplicaSettings) -> Backend:
    from replica.tiny_tokenizer import END, SPECIAL_TOKENS, tiny_bundle, word_token_ids

    if settings.model != "tiny":
        raise BackendError(f"--engine sim plays the model tiny only, not {settings.model!r}")
    cost = simulated_cost(settings)
    return Backend(
        runner=SimulatedRunner(
            settings.blocks or _SIMULATED_BLOCKS,
            settings.block_size,
            cost,
            word_token_ids(),
            host_blocks=settings.host_blocks,
        ),
        bundle=tiny_bundle(),
        weights_id="simulated",
        context_tokens=_SIMULATED_CONTEXT_TOKENS,
        eos_token_ids=frozenset({SPECIAL_TOKENS.index(END)}),
        replica_class="/".join(("tiny", "sim", *map(str, astuple(cost)))),
        cost=CostCoefficients(cost.base_seconds, cost.per_token_seconds, cost.per_token_context_seconds),
    )


def _torch(settings: ReplicaSettings) -> Backend:
    try:
        import torch

        from replica.model_loader import ModelLoadError, load
        from replica.model_runner import ModelRunner
        from replica.pool_size import check_host_blocks, pool_blocks
    except ImportError as error:
        raise BackendError(f"--engine torch lacks {error.name}: pip install 'warmroute[engine]'") from error

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    try:
        loaded = load(settings.model, settings.device, settings.dtype)
        blocks = pool_blocks(loaded.model, settings.block_size, settings.blocks)
        check_host_blocks(loaded.model, settings.block_size, settings.host_blocks)
    except ModelLoadError as error:
        raise BackendError(str(error)) from error
    device, dtype = loaded.model.device.type, str(loaded.model.dtype).removeprefix("torch.")
    return Backend(
        runner=ModelRunner(loaded.model, blocks, settings.block_size, settings.host_blocks),
        bundle=loaded.bundle,
        weights_id=loaded.weights_id,
        context_tokens=loaded.context_tokens,
        eos_token_ids=loaded.eos_token_ids,
        replica_class=f"{settings.model}/torch/{device}/{dtype}",
    )
