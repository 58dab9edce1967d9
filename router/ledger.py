"""Work on the way: what this router has dispatched to each replica and what has not come back yet.

Pure: the clock is handed in. One `Dispatch` per attempt, counted before its first byte leaves and released once, in the
caller's `finally`. Per replica:

    pending    [ d3 ][ d4 ][ d5 ]     prefills not yet at their first token, oldest first; the head is being computed
                 ^ head_since         when the head began: its dispatch, or the first token (or end) of the one before
    active     3 + everything past its first token and not yet ended
    promised   key -> references      blocks that will be held there once their request has computed them

A request whose first token cannot be seen (its answer comes in one piece) leaves `pending` when its estimate has
passed. A visible one that is overdue is expected to need as long again as it is late: a stuck replica looks busier and
busier, never idle.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence

import msgspec

from shared.blocks import PublishedKey

__all__ = ["Dispatch", "Ledger", "Standing"]

_BACKLOG_MEMORY_SECONDS = 60.0
_SMOOTHED_EVERY_SECONDS = 0.05
"""Where nothing changes: the powers of e for every replica would be a good part of a decision."""
_FILL_MEMORY_SECONDS = 600.0
"""About as long as a busy replica's cache lives."""


class Dispatch:
    """One attempt at one replica, from just before its first byte leaves until `Ledger.release`."""

    __slots__ = ("first_token_seen", "promised", "released", "replica_id", "service_seconds", "streamed", "uncached")

    def __init__(
        self,
        replica_id: str,
        service_seconds: float,
        uncached: int,
        promised: Sequence[PublishedKey],
        streamed: bool,
    ) -> None:
        self.replica_id = replica_id
        self.service_seconds = service_seconds
        self.uncached = uncached
        self.promised = promised
        self.streamed = streamed
        self.first_token_seen = False
        self.released = False


class Standing(msgspec.Struct, frozen=True, gc=False):
    """How a replica stands now, by what this router has sent it."""

    wait_seconds: float = 0.0
    """Of prefill ahead of a request that would be dispatched now."""
    backlog_share: float = 0.0
    """Of the last minute, smoothed: the time in which it had a prefill under way."""
    active: int = 0
    decoding: int = 0
    """Past their prefill."""
    pending_tokens: int = 0
    """Uncached, dispatched and not yet computed."""
    filled_tokens: float = 0.0
    """Uncached and dispatched, fading within minutes: what its cache has had to make room for lately."""


_IDLE = Standing()


class _Account:
    """What is under way at one replica."""

    __slots__ = (
        "active",
        "backlog_share",
        "filled_tokens",
        "head_since",
        "pending",
        "pending_seconds",
        "pending_tokens",
        "promised",
        "smoothed_at",
    )

    def __init__(self, now: float) -> None:
        self.active = 0
        self.pending: OrderedDict[Dispatch, None] = OrderedDict()
        self.pending_seconds = 0.0
        self.pending_tokens = 0
        self.head_since = now
        self.promised: dict[PublishedKey, int] = {}
        self.backlog_share = 0.0
        self.filled_tokens = 0.0
        self.smoothed_at = now

    def smooth(self, now: float) -> None:
        """Take the time since the last change into what fades with it. Call before `pending` changes."""
        elapsed = now - self.smoothed_at
        if elapsed > 0:
            kept = math.exp(-elapsed / _BACKLOG_MEMORY_SECONDS)
            self.backlog_share = self.backlog_share * kept + (1.0 - kept if self.pending else 0.0)
            self.filled_tokens *= math.exp(-elapsed / _FILL_MEMORY_SECONDS)
            self.smoothed_at = now

    def enqueue(self, dispatch: Dispatch, now: float) -> None:
        self.smooth(now)
        if not self.pending:
            self.head_since = now
        self.pending[dispatch] = None
        self.pending_seconds += dispatch.service_seconds
        self.pending_tokens += dispatch.uncached
        self.filled_tokens += dispatch.uncached

    def dequeue(self, dispatch: Dispatch, now: float) -> float | None:
        """Take `dispatch` out of the backlog. Its seconds of service when it was at the head, else None."""
        if dispatch not in self.pending:
            return None
        self.smooth(now)
        was_head = dispatch is next(iter(self.pending))
        del self.pending[dispatch]
        self.pending_tokens -= dispatch.uncached
        # An empty backlog is exactly zero, whatever the rounding of the sums before.
        self.pending_seconds = self.pending_seconds - dispatch.service_seconds if self.pending else 0.0
        if not was_head:
            return None
        served = max(0.0, now - self.head_since)
        self.head_since = now
        return served

    def advance(self, now: float) -> None:
        """Let the heads whose first token cannot be seen pass once their time is over."""
        while self.pending:
            head = next(iter(self.pending))
            passed_at = self.head_since + head.service_seconds
            if head.streamed or passed_at > now:
                return
            self.dequeue(head, passed_at)


class Ledger:
    """Counters of every replica this router sends to. A refresh of the fleet never resets them."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def dispatch(
        self,
        replica_id: str,
        now: float,
        *,
        service_seconds: float,
        uncached_tokens: int,
        promised: Sequence[PublishedKey] = (),
        streamed: bool = True,
    ) -> Dispatch:
        """Count an attempt in. `promised` are the keys it will compute: the chain's tail past what is held."""
        account = self._accounts.get(replica_id)
        if account is None:
            account = self._accounts[replica_id] = _Account(now)
        dispatch = Dispatch(replica_id, service_seconds, uncached_tokens, promised, streamed)
        account.advance(now)
        account.active += 1
        account.enqueue(dispatch, now)
        references = account.promised
        for key in promised:
            references[key] = references.get(key, 0) + 1
        return dispatch

    def first_token(self, dispatch: Dispatch, now: float) -> float | None:
        """The prefill is over. Its seconds of service if it was the one being computed, to learn the cost from."""
        if dispatch.released or dispatch.first_token_seen:
            return None
        dispatch.first_token_seen = True
        return self._accounts[dispatch.replica_id].dequeue(dispatch, now)

    def release(self, dispatch: Dispatch, now: float) -> None:
        """The attempt has ended, however it did. Safe to call again: only the first call counts."""
        if dispatch.released:
            return
        dispatch.released = True
        account = self._accounts[dispatch.replica_id]
        account.active -= 1
        account.dequeue(dispatch, now)
        references = account.promised
        for key in dispatch.promised:
            if references[key] == 1:
                del references[key]
            else:
                references[key] -= 1

    def standing(self, replica_id: str, now: float) -> Standing:
        account = self._accounts.get(replica_id)
        if account is None:
            return _IDLE
        if now - account.smoothed_at > _SMOOTHED_EVERY_SECONDS:
            account.smooth(now)
        active, pending = account.active, account.pending
        head = next(iter(pending), None)
        if head is not None and not head.streamed:
            account.advance(now)
            head = next(iter(pending), None)
        if head is None:
            return Standing(0.0, account.backlog_share, active, active, 0, account.filled_tokens)
        head_seconds = head.service_seconds
        behind_seconds = account.pending_seconds - head_seconds
        return Standing(
            max(0.0, behind_seconds) + abs(head_seconds - (now - account.head_since)),
            account.backlog_share,
            active,
            active - len(pending),
            account.pending_tokens,
            account.filled_tokens,
        )

    def active(self, replica_id: str) -> int:
        account = self._accounts.get(replica_id)
        return account.active if account else 0

    def promised_depth(self, replica_id: str, keys: Sequence[PublishedKey], held_blocks: int) -> int:
        """How deep the chain `keys` is held or promised there, given that its first `held_blocks` are held.

        A dispatch promises an unbroken tail of its chain, so promises past `held_blocks` are a run to bisect.
        """
        account = self._accounts.get(replica_id)
        if account is None or held_blocks >= len(keys) or keys[held_blocks] not in account.promised:
            return held_blocks
        low, high = held_blocks, len(keys)
        while high - low > 1:
            middle = (low + high) // 2
            if keys[middle] in account.promised:
                low = middle
            else:
                high = middle
        return high

    @property
    def total_active(self) -> int:
        return sum(account.active for account in self._accounts.values())

    def retain(self, replica_ids: Collection[str]) -> None:
        """Forget replicas that are gone and owe nothing; one that still has requests under way keeps its account."""
        for replica_id in [i for i, account in self._accounts.items() if i not in replica_ids and not account.active]:
            del self._accounts[replica_id]

    def check_integrity(self) -> None:
        """Sums equal their parts, nothing is negative, an idle replica owes nothing."""
        for replica_id, account in self._accounts.items():
            assert 0 <= len(account.pending) <= account.active, replica_id
            assert account.pending_tokens == sum(d.uncached for d in account.pending), replica_id
            assert math.isclose(account.pending_seconds, sum(d.service_seconds for d in account.pending), abs_tol=1e-6)
            assert all(count > 0 for count in account.promised.values()), replica_id
            assert 0.0 <= account.backlog_share <= 1.0, replica_id
            assert account.filled_tokens >= 0.0, replica_id
            assert account.active or not (account.pending or account.promised), replica_id
