"""What stands in deploy/ for Prometheus and Grafana asks for metrics that there are, with labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.replica.sim_server import serving
from tests.router.conftest import BenchFactory, chat
from tests.router.fake_replica import hang_up

DEPLOY = Path(__file__).parents[2] / "deploy"
_NAME = re.compile(r"warmroute_[a-z0-9_]+")


async def _told(bench: BenchFactory) -> set[str]:
    """By a router under which a replica failed, and by a replica."""
    b = await bench(2)
    b.replica_for(min(replica.id for replica in b.replicas)).behave = hang_up
    for _ in range(2):
        async with b.client.post(b.url, json=chat()) as response:
            await response.read()
    texts = []
    async with b.client.get(b.router.url + "/metrics") as response:
        texts.append(await response.text())
    async with serving() as (_, client), client.get("/metrics") as response:
        texts.append(await response.text())
    families = [family for text in texts for family in text_string_to_metric_families(text)]
    # Without Redis there is none to be up.
    return {sample.name for family in families for sample in family.samples} | {"warmroute_router_redis_up"}


async def test_dashboards_and_alerts_ask_for_what_is_told(bench: BenchFactory) -> None:
    told = await _told(bench)
    for file in ("grafana/dashboards/warmroute.json", "prometheus/alerts.yml"):
        asked = set(_NAME.findall((DEPLOY / file).read_text()))
        assert asked - told == set(), file
        assert len(asked) > 5


def test_the_grafana_dashboard_is_json_with_panels_side_by_side() -> None:
    panels = json.loads((DEPLOY / "grafana/dashboards/warmroute.json").read_text())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(panels) == len({panel["title"] for panel in panels})
