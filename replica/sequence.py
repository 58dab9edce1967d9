"""One request as the engine sees it: its tokens, its blocks, and how far it has been computed.

A sequence holds state and does nothing clever: the scheduler decides, the prefix cache owns blocks, the runner
owns tensors.

    tokens     [ prompt .............. | output so far ... ]
    computed   [ in the KV pool .......... )                   catches up with len(tokens), step by step
    block_ids  [  b0  |  b1  |  b2  |  b3  ]                   block i holds tokens[i*B : (i+1)*B]
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from shared.blocks import BlockKey
from shared.public_prefixes import Branch

__all__ = ["FinishReason", "SamplingParams", "Sequence", "SequenceStatus"]


_T = TypeVar("_T")


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    STOP = "stop"
    """A stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` are there (refused beforehand where they would not fit the context)."""
    ABORT = "abort"
    """The client left, or the server is going away."""
    COLD = "cold"
    """The cache holds much less of the prompt than the request expects. Nothing was computed."""
    ERROR = "error"
    """The engine failed; the message goes with the event."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. `temperature` 0 is greedy. The defaults switch every filter and penalty off.

    `max_tokens` 0 computes the prompt for the cache alone.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one's probability are out."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens seen in prompt or output, and multiplies the negative ones."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that is in the output."""
    frequency_penalty: float = 0.0
    """Taken from it for each time it is there."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    """How many likeliest tokens are told with each token of the answer, beside that token itself; None: no logprobs."""

    @property
    def changes_logits(self) -> bool:
        """Something other than temperature and filters, which even greedy decoding has to mind."""
        return bool(self.logit_bias or self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


@dataclass(slots=True, eq=False)
class Sequence:
    """`root` is the namespace root of the request's tenant and model: the key before its first block.

    Behind a prefix that all tenants share, `branch` says what the tenant's own blocks continue.
    """

    request_id: str
    tokens: list[int]
    prompt_tokens: int
    params: SamplingParams
    root: BlockKey
    arrival_seconds: float = 0.0
    branch: Branch | None = None
    tenant: str = ""
    """Whose turn and whose share of the engine it is."""
    expected_cached_tokens: int = 0
    """If the cache holds much less of the prompt when its turn comes, it is refused (`COLD`) instead of computed."""
    keep_seconds: float = 0.0
    """The wish that its prompt's blocks are evicted later than others, for so long after its end."""
    status: SequenceStatus = SequenceStatus.WAITING
    block_ids: list[int] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    """Keys of the full blocks of `tokens` that are known so far; the prefix cache extends it."""
    computed_tokens: int = 0
    registered_blocks: int = 0
    """How many leading blocks are in the prefix cache's table, and so may be shared."""
    awaited_key: BlockKey | None = None
    """While waiting: the block that somebody else is computing for it."""
    preemptions: int = 0
    """How often it lost its blocks and began again."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache gave on admission. Set once: a later recompute does not change it."""
    finish_reason: FinishReason | None = None

    def continued(self, index: int, blocks: Items[_T]) -> _T | BlockKey:
        """What block `index` continues: the one before it in `blocks` (ids or keys), or a root."""
        if self.branch is not None and index == self.branch.blocks:
            return self.branch.root
        return blocks[index - 1] if index else self.root

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def uncomputed_tokens(self) -> int:
        return len(self.tokens) - self.computed_tokens
