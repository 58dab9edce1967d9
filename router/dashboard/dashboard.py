"""`GET /dashboard`: a page for people, and `/dashboard/data`, what it shows, for whoever may see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from importlib.metadata import version
from urllib.parse import parse_qs

import msgspec

from router.admission import Admission
from router.client_request import ClientRequest, Response
from router.control import Control
from router.dashboard.history import TICK_SECONDS, History
from router.dashboard.page import page
from router.dashboard.report import ReplicaReport, Report, together
from router.follower import Follower
from router.metrics import ReplicaCounts, RouterMetrics
from router.siblings import Siblings

__all__ = ["Dashboard"]

_NEVER = -1
_NOTHING = ReplicaCounts()
_encode = msgspec.json.Encoder().encode
_decode_report = msgspec.msgpack.Decoder(Report).decode


class Dashboard:
    """`follower` is None where there is no Redis."""

    def __init__(
        self,
        control: Control,
        metrics: RouterMetrics,
        admission: Admission,
        follower: Follower | None,
        siblings: Siblings | None = None,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._control = control
        self._metrics = metrics
        self._admission = admission
        self._follower = follower
        self._wall_clock = wall_clock
        self._history = History(metrics, admission)
        self._page = page()
        self._siblings = siblings
        if siblings is not None:
            siblings.register("report", lambda since: msgspec.msgpack.encode(self.report(int(since))))

    async def run(self) -> None:
        """Note what happens, until cancelled."""
        while True:
            tick = self._tick()
            await asyncio.sleep((tick + 1) * TICK_SECONDS - self._wall_clock())
            self._history.note(tick)

    async def page(self, request: ClientRequest) -> Response:
        return self._page

    async def data(self, request: ClientRequest) -> Response:
        """All that is shown; of the history what came after the tick in `since`."""
        self._control.require_admin(request)
        since = _since(request.target)
        others = await self._siblings.ask("report", b"%d" % since) if self._siblings is not None else {}
        reports = [self.report(since), *map(_decode_report, others.values())]
        # The tick before this one may not have been noted yet by all.
        report = together(reports, self._tick() - 1)
        return Response(body=_encode(report), headers=[("Cache-Control", "no-store")])

    def report(self, since: int) -> Report:
        """As this worker knows it."""
        follower = self._follower
        return Report(
            version=version("warmroute"),
            policy=self._control.policy,
            view=self._control.view,
            view_age_seconds=follower.view.age_seconds if follower is not None else None,
            redis=follower.connected if follower is not None else None,
            in_flight=self._admission.in_flight,
            queued=self._admission.queued,
            bounds=list(self._metrics.first_token.bounds),
            samples=self._history.after(since),
            replicas=[self._replica(said) for said in self._control.describe_replicas()],
            recent=list(self._metrics.recent),
        )

    def _replica(self, said: dict[str, object]) -> ReplicaReport:
        counts = self._metrics.replicas.get(str(said["id"]), _NOTHING)
        return ReplicaReport(
            said,
            sum(counts.decisions.values()),
            sum(counts.failures.values()),
            counts.queried_tokens,
            counts.predicted_tokens,
            counts.hit_tokens,
        )

    def _tick(self) -> int:
        return int(self._wall_clock() // TICK_SECONDS)


def _since(target: str) -> int:
    given = parse_qs(target.partition("?")[2]).get("since", [""])[0]
    return int(given) if given.isascii() and given.isdigit() and len(given) < 16 else _NEVER
