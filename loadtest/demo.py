"""`make demo`: cache-aware against round robin on two real replicas, neither of which can hold all conversations."""

from __future__ import annotations

from loadtest.compare import run
from shared.settings import CompareSettings

DEMO = CompareSettings(
    policies=("cache-aware", "round-robin"),
    workload="chat",
    replicas=2,
    engine="torch",
    model="tiny",
    rate=2.5,
    requests=72,
    repeats=3,
    max_tokens=12,
    blocks=176,
    threads=1,
    out="reports/demo",
)

if __name__ == "__main__":
    raise SystemExit(run(DEMO))
