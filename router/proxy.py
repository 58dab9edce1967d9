"""Requests in, the chosen replica's answers out.

    permit -> body -> prompt -> [ decide -> dispatch -> open -> first byte -> relay -> finish ] -> log line
                                  `---- once more on the next best replica, before the first byte ----'

What goes up comes down in the `finally` next to it: permit, dispatch, upstream connection, the breaker's trial. The
client's leaving cancels the handler wherever it waits, and those same lines release everything, without awaiting.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from router.admission import Admission
from router.bodies import unpacked
from router.candidates import Candidates
from router.client_request import ClientRequest, Response
from router.decision_log import DecisionLog, Logged
from router.exchange import Exchange, error_response, router_exhausted, router_shutting_down
from router.headers import SESSION_HEADER, RequestHeaders, RequestIds
from router.health import Health, Trial
from router.metrics import RouterMetrics
from router.placement import Attempt, NoReplicaError, Placement
from router.policies.base import Policy, Request
from router.policies.least_loaded import LeastLoaded
from router.relay import BrokenOffError, relay
from router.retries import Failing, Retries
from router.tracing import BeginTrace, trace_of
from router.upstream import Upstream, UpstreamError, UpstreamResponse
from shared.api import ApiError, parse_routing
from shared.api_errors import internal_error
from shared.telemetry import fields

__all__ = ["Limits", "Proxy"]

_logger = logging.getLogger(__name__)

_COUNT = re.compile(rb"[0-9]{1,12}")
_EXPECT_CACHED = b"x-warmroute-expect-cached-tokens: %d\r\n"
_ELSEWHERE: dict[int, Failing] = {502: "unanswered", 503: "refused"}
"""What a dying or full replica answers: another one may do better. Client errors are the client's. A 502 is what stands
before a replica says of it, who may have executed the request.
"""
_OUR_KEY_REFUSED = "its operator must give both the same key and secret (WARMROUTE_UPSTREAM_KEY, WARMROUTE_SECRET)"
_MOST_UNREACHABLE = 4
"""Replicas in turn to which a request cannot be sent. Each may take the time to connect, and repeats no work."""


@dataclass(frozen=True, slots=True)
class Limits:
    max_body_bytes: int
    max_retries: int
    request_timeout_seconds: float
    """From a request's arrival to the last byte of its answer, whatever is tried in between."""
    expect_cached: bool = False
    """Tell replicas what they are believed to hold of a prompt, so that one that holds much less says so at once."""


class Proxy:
    """Forwards what generates, and everything else under `/v1/` that only a replica can answer."""

    def __init__(
        self,
        candidates: Candidates,
        placement: Placement,
        upstream: Upstream,
        health: Health,
        admission: Admission,
        metrics: RouterMetrics,
        limits: Limits,
        retries: Retries,
        headers: RequestHeaders,
        decision_log: DecisionLog | None = None,
        begin_trace: BeginTrace = trace_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._candidates = candidates
        self._placement = placement
        self._upstream = upstream
        self._health = health
        self._admission = admission
        self._metrics = metrics
        self._limits = limits
        self._retries = retries
        self._decision_log = decision_log
        self._begin_trace = begin_trace
        self._request_headers = headers
        self._clock = clock
        self._ids = RequestIds()
        self._least_loaded = LeastLoaded()

    async def generate(self, request: ClientRequest) -> Response | None:
        """One of the paths that generate: placed by its prompt."""
        return await self._answer(request, self._generate)

    async def pass_through(self, request: ClientRequest) -> Response | None:
        """Any other path under `/v1/`: to the replica with the fewest requests active."""
        return await self._answer(request, self._pass_through)

    def cut_off(self) -> None:
        """The router goes away: what is still streaming ends with an error its client understands."""
        self._upstream.cut_off()

    async def _answer(
        self,
        request: ClientRequest,
        forward: Callable[[ClientRequest, Exchange], Awaitable[None]],
    ) -> Response | None:
        request_id = self._ids.of(request.header(b"x-request-id"))
        exchange = Exchange(request_id, request.path, self._clock(), self._begin_trace(request))
        try:
            if not self._admission.try_enter():
                await self._queue(request, exchange)
            try:
                await forward(request, exchange)
                return None
            finally:
                self._admission.leave()
        except ApiError as error:
            return self._refuse(exchange, error)
        except ConnectionError:
            return None  # the client is gone: nobody is there to be told
        except Exception:
            _logger.exception("a request failed: %s", exchange.path)
            if exchange.status:  # the answer has begun: it can only be cut short
                request.connection.abort()
                return None
            return self._refuse(exchange, internal_error())
        finally:
            exchange.seconds = self._clock() - exchange.started_seconds
            self._metrics.ended(exchange)
            exchange.trace.end(exchange)
            exchange.log()

    async def _queue(self, request: ClientRequest, exchange: Exchange) -> None:
        try:
            await self._admission.wait(request.tenant)
        finally:
            exchange.queued_seconds = self._clock() - exchange.started_seconds

    async def _generate(self, request: ClientRequest, exchange: Exchange) -> None:
        body, text = await self._read(request)
        routing = parse_routing(exchange.path, text)
        exchange.model = routing.model
        asked = await self._candidates.read(routing, request.tenant, request.header(SESSION_HEADER))
        exchange.streamed = asked.streamed
        await self._deliver(self._errand(request, exchange, body, asked))

    async def _pass_through(self, request: ClientRequest, exchange: Exchange) -> None:
        body, text = await self._read(request)
        exchange.model = _model_named_in(text)
        if exchange.model:
            self._candidates.require_served(exchange.model)
        asked = Request(prompt_tokens=0, keys=[], block_size=1, streamed=False)
        await self._deliver(self._errand(request, exchange, body, asked, self._least_loaded))

    async def _read(self, request: ClientRequest) -> tuple[bytes, bytes]:
        """The body as it came, and as text."""
        body = await request.read()
        return body, unpacked(body, request.header(b"content-encoding"), self._limits.max_body_bytes)

    def _errand(
        self, request: ClientRequest, exchange: Exchange, body: bytes, asked: Request, policy: Policy | None = None
    ) -> _Errand:
        headers = self._request_headers.lines(request.headers, exchange.request_id, request.tenant, exchange.trace)
        return _Errand(request, exchange, headers, body, asked, policy)

    async def _deliver(self, errand: _Errand) -> None:
        exchange, asked = errand.exchange, errand.asked
        last_failure: ApiError | None = None
        self._retries.arrived()
        while True:
            now = self._clock()
            try:
                replicas = self._candidates.of(exchange.model, now)
                view = self._candidates.view()
                decision = self._placement.decide(
                    asked,
                    replicas,
                    now,
                    excluded=errand.failed,
                    view=view,
                    policy=errand.policy,
                    corrections=errand.corrections,
                )
            except NoReplicaError:
                raise last_failure or self._candidates.nobody(exchange.model) from None
            replica = next(replica for replica in replicas if replica.id == decision.chosen.replica_id)
            attempt = self._placement.dispatch(asked, replica, decision, now)
            try:
                exchange.decision = decision
                exchange.attempts += 1
                if self._decision_log is not None and errand.policy is None:
                    errand.logged = self._decision_log.decided(
                        exchange.request_id, exchange.attempts, asked, decision, now
                    )
                self._metrics.dispatched(replica.id, decision.policy, decision.reason)
                others = errand.repeats < self._limits.max_retries and len(decision.candidates) > 1
                await self._attempt(errand, attempt, replica.url, others)
                return
            except _ColderThanBelieved as colder:
                errand.corrections[replica.id] = colder.cached_tokens
            except _TryElsewhere as elsewhere:
                errand.failed.append(replica.id)
                errand.repeats += elsewhere.was_asked
                last_failure = elsewhere.error
                self._metrics.retried()
            finally:
                self._placement.finish(attempt, self._clock())

    async def _attempt(self, errand: _Errand, attempt: Attempt, base_url: str, others: bool) -> None:
        """Raises _TryElsewhere where another replica may be asked, _ColderThanBelieved where this one took nothing on
        for want of the cache it was chosen for, and ApiError where nothing has been answered and nobody may be asked.
        """
        request, exchange = errand.request, errand.exchange
        replica_id = attempt.decision.chosen.replica_id
        headers = self._headers(errand, attempt)
        upstream: UpstreamResponse | None = None
        trial = self._health.begin(replica_id, self._clock())
        try:
            upstream = await self._upstream.open(
                request.method,
                base_url,
                request.target,
                headers,
                errand.body,
                ends_within_seconds=self._seconds_left(exchange),
            )
            refused = upstream.status == 401 and self._request_headers.are_credentials_ours(request.tenant)
            # 429 and 503 are pressure, other client errors the client's: the replica is well.
            well = (upstream.status < 500 or upstream.status == 503) and not refused
            if well:
                self._health.answering(replica_id)
            else:
                reason = _OUR_KEY_REFUSED if refused else "it answered with an error"
                self._note_failure(replica_id, f"status_{upstream.status}", reason, trial)
            expected = headers is not errand.headers
            if upstream.status == 412 and expected and (held := _cached_tokens(upstream)) is not None:
                self._placement.colder(attempt, held)
                raise _ColderThanBelieved(held)
            failing = "refused" if refused else _ELSEWHERE.get(upstream.status)
            if failing is not None and others and self._retries.allows(failing, request.method, exchange.path):
                raise _TryElsewhere(_replica_failed(f"it answered {upstream.status}"))
            if refused:
                raise ApiError(
                    502, "replica_refused_router", f"the replica does not answer this router: {_OUR_KEY_REFUSED}"
                )
            first = await upstream.read()
            self._first_byte(errand, attempt, upstream)
            await relay(request, upstream, first, exchange)
            if well:
                self._health.succeeded(replica_id)
            exchange.outcome = "ok" if upstream.status < 400 else f"replica_{upstream.status}"
        except UpstreamError as error:
            if error.failure == "cut":
                raise router_shutting_down() from None
            if error.failure == "exhausted":
                raise router_exhausted() from None
            self._note_failure(replica_id, error.failure, str(error), trial)
            if error.failure in ("timeout", "overdue"):
                raise _replica_failed(str(error), 504) from None
            failure = _replica_failed(str(error))
            if error.failure == "unreachable" and len(errand.failed) < _MOST_UNREACHABLE:
                # If an old connection took the request and broke, whatever was computed has gone with the replica.
                if not error.sent or self._retries.allows("lost", request.method, exchange.path):
                    raise _TryElsewhere(failure, was_asked=False) from None
                raise failure from None
            failing = "lost" if error.failure == "lost" else "unanswered"
            if others and self._retries.allows(failing, request.method, exchange.path):
                raise _TryElsewhere(failure) from None
            raise failure from None
        except BrokenOffError as broken:
            exchange.outcome = "shutting_down"
            if broken.error.failure != "cut":
                exchange.outcome = "replica_broke_off"
                if (
                    broken.error.failure != "overdue"
                ):  # it is answering: that its client asked too much is not its fault
                    self._note_failure(replica_id, broken.error.failure, str(broken.error), trial)
        finally:
            if trial is not None:
                self._health.abandoned(replica_id, trial)
            if upstream is not None:
                upstream.close()

    def _seconds_left(self, exchange: Exchange) -> float:
        """Raises ApiError 504 where there are none."""
        seconds = self._limits.request_timeout_seconds - (self._clock() - exchange.started_seconds)
        if seconds <= 0:
            raise _replica_failed("no time is left for the request", 504)
        return seconds

    def _headers(self, errand: _Errand, attempt: Attempt) -> bytes:
        """With what is expected of the replica's cache; not again after a refusal: one is enough."""
        expected = attempt.decision.chosen.matched_tokens  # the engine may think better of host memory
        if not (self._limits.expect_cached and expected) or errand.corrections:
            return errand.headers
        return errand.headers + _EXPECT_CACHED % expected

    def _first_byte(self, errand: _Errand, attempt: Attempt, upstream: UpstreamResponse) -> None:
        exchange, now = errand.exchange, self._clock()
        exchange.status = upstream.status
        exchange.first_byte_seconds = now - exchange.started_seconds
        if upstream.status < 300:
            exchange.cached_tokens = _cached_tokens(upstream)
            self._placement.first_token(attempt, now, exchange.cached_tokens)
            if errand.logged is not None:
                errand.logged.first_token(now, exchange.cached_tokens)

    def _note_failure(self, replica_id: str, failure: str, reason: str, trial: Trial | None) -> None:
        self._health.failed(replica_id, self._clock(), trial)
        self._metrics.failed(replica_id, failure)
        _logger.warning("replica failed", extra=fields(replica=replica_id, failure=failure, reason=reason))

    def _refuse(self, exchange: Exchange, error: ApiError) -> Response:
        exchange.status, exchange.outcome = error.status, error.code
        return error_response(error, exchange.path, exchange.request_id, exchange.headers())


@dataclass(slots=True)
class _Errand:
    """A request as it is to be delivered, to whichever replica."""

    request: ClientRequest
    exchange: Exchange
    headers: bytes
    body: bytes
    asked: Request
    policy: Policy | None
    corrections: dict[str, int] = field(default_factory=dict)
    """What replicas said they hold of the prompt, where that was much less than believed."""
    logged: Logged | None = None
    """The attempt under way, in the decision log."""
    failed: list[str] = field(default_factory=list)
    """Replicas that are not asked again."""
    repeats: int = 0
    """How many of them may have computed something."""


class _ColderThanBelieved(Exception):  # noqa: N818 - a turn of the road, not an error
    """The replica computed nothing: it holds only `cached_tokens` of the prompt. As if it had not been asked."""

    def __init__(self, cached_tokens: int) -> None:
        super().__init__(cached_tokens)
        self.cached_tokens = cached_tokens


class _TryElsewhere(Exception):  # noqa: N818 - a turn of the road, not an error
    """Nothing has been answered and another replica may do better; `error` is the answer if there is none."""

    def __init__(self, error: ApiError, *, was_asked: bool = True) -> None:
        super().__init__(error.message)
        self.error = error
        self.was_asked = was_asked


class _ModelField(msgspec.Struct):
    model: str = ""


_decode_model = msgspec.json.Decoder(_ModelField).decode


def _model_named_in(text: bytes) -> str:
    """The body's `model`, if it is JSON and has one; whatever else it is, the replica will judge it."""
    try:
        return _decode_model(text).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _cached_tokens(upstream: UpstreamResponse) -> int | None:
    """As the engine counted them; None where it does not say."""
    cached = upstream.head.get(b"x-warmroute-cached-tokens")
    return int(cached) if cached is not None and _COUNT.fullmatch(cached) else None


def _replica_failed(how: str, status: int = 502) -> ApiError:
    code = "replica_timeout" if status == 504 else "replica_failed"
    return ApiError(status, code, f"the replica did not answer: {how}; send the request again")
