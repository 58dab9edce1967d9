"""What the page shows, as one worker knows it, and as several know it together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from router.dashboard.history import Sample, add_up
from router.recent import MOST_RECENT, Recent

__all__ = ["Report", "ReplicaReport", "together"]

_BREAKER_SERIOUSNESS = ("closed", "half-open", "open")


class ReplicaReport(msgspec.Struct, gc=False):
    """`said` is what `GET /replicas` says of it; tokens are those of its answers since the router began."""

    said: dict[str, Any]
    requests: int
    failures: int
    queried_tokens: int
    predicted_tokens: int
    hit_tokens: int


class Report(msgspec.Struct, gc=False):
    version: str
    policy: str
    view: str
    view_age_seconds: float | None
    redis: bool | None
    """None: the router was started without one."""
    in_flight: int
    queued: int
    bounds: list[float]
    """Of the buckets of `Sample.first_token`, in seconds."""
    samples: list[Sample]
    replicas: list[ReplicaReport]
    recent: list[Recent]
    workers: int = 1


def together(reports: Sequence[Report], until_tick: int) -> Report:
    """What happened is added up; what is believed is told by the first, at its worst where workers differ."""
    first = reports[0]
    known = [{replica.said["id"]: replica for replica in report.replicas} for report in reports]
    newest = sorted((recent for report in reports for recent in report.recent), key=lambda recent: -recent.ended_at)
    return msgspec.structs.replace(
        first,
        in_flight=sum(report.in_flight for report in reports),
        queued=sum(report.queued for report in reports),
        samples=add_up((report.samples for report in reports), until_tick),
        replicas=[_of_all([of[r.said["id"]] for of in known if r.said["id"] in of]) for r in first.replicas],
        recent=newest[:MOST_RECENT],
        workers=len(reports),
    )


def _of_all(replicas: Sequence[ReplicaReport]) -> ReplicaReport:
    said = [replica.said for replica in replicas]
    worst = {
        "breaker": max((each["breaker"] for each in said), key=_BREAKER_SERIOUSNESS.index),
        "trust": min(each["trust"] for each in said),
        "reachable": all(each["reachable"] for each in said),
    }
    return ReplicaReport(
        said[0] | worst,
        sum(replica.requests for replica in replicas),
        sum(replica.failures for replica in replicas),
        sum(replica.queried_tokens for replica in replicas),
        sum(replica.predicted_tokens for replica in replicas),
        sum(replica.hit_tokens for replica in replicas),
    )
