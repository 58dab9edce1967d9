"""`make demo`: cache-aware against round robin on two real replicas, neither of which can hold all conversations.

Fourteen open conversations of up to some 700 tokens need about 400 blocks of 16; a replica has 210. Three requests per
second keep a replica's core about a third busy under round robin, so what is seen is caching, not a queue.
"""

from __future__ import annotations

from loadtest.compare import run
from shared.settings import CompareSettings

DEMO = CompareSettings(
    policies=("cache-aware", "round-robin"),
    workload="chat",
    replicas=2,
    engine="torch",
    model="tiny",
    rate=3.0,
    requests=96,
    repeats=3,
    max_tokens=8,
    blocks=210,
    threads=1,
    out="reports/demo",
)

if __name__ == "__main__":
    raise SystemExit(run(DEMO))
