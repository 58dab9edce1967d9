"""Several workers' metrics as one answer: each series with the worker that tells it.

Not their sums: a worker that is started again begins at zero, and a sum that falls looks to Prometheus like a counter
that has begun anew, and so like a burst of all that the other workers ever did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from prometheus_client.core import Metric

__all__ = ["merged", "packed"]

_LABEL = "worker"


class _Series(msgspec.Struct, array_like=True, gc=False):
    name: str
    labels: dict[str, str]
    value: float


class _Family(msgspec.Struct, array_like=True):
    name: str
    text: str
    type: str
    series: list[_Series]


_decode = msgspec.msgpack.Decoder(list[_Family]).decode


def packed(families: Iterable[Metric]) -> bytes:
    return msgspec.msgpack.encode(
        [
            _Family(f.name, f.documentation, f.type, [_Series(s.name, s.labels, float(s.value)) for s in f.samples])
            for f in families
        ]
    )


def merged(workers: Mapping[int, bytes]) -> list[Metric]:
    """What each worker has `packed`."""
    whole: dict[str, Metric] = {}
    for number in sorted(workers):
        for family in _decode(workers[number]):
            metric = whole.setdefault(family.name, Metric(family.name, family.text, family.type))
            for series in family.series:
                metric.add_sample(series.name, {_LABEL: str(number), **series.labels}, series.value)
    return list(whole.values())
