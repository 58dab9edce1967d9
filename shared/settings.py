"""One dataclass per program; its flags, variables and TOML keys all derive from it (see `settings_sources`).

Made directly, a class has its defaults: `RouterSettings(port=0)`. From the command line: `parse(RouterSettings, argv,
os.environ, "warmroute router")`.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.settings_cluster import DoctorSettings, UpSettings
from shared.settings_fields import BENCH_NAMES, POLICY_NAMES
from shared.settings_proof import BenchRouterSettings, BenchSettings, CompareSettings, SimulateSettings
from shared.settings_replica import ReplicaSettings
from shared.settings_router import RouterSettings, RouteSettings, TopSettings
from shared.settings_sources import SettingsError, parse, unknown_variables

__all__ = [
    "BENCH_NAMES",
    "BenchRouterSettings",
    "BenchSettings",
    "CompareSettings",
    "DoctorSettings",
    "POLICY_NAMES",
    "ReplicaSettings",
    "RouteSettings",
    "RouterSettings",
    "SettingsError",
    "SimulateSettings",
    "TopSettings",
    "UpSettings",
    "misspelt_variables",
    "parse",
]

_PROGRAMS = (
    BenchRouterSettings,
    BenchSettings,
    CompareSettings,
    DoctorSettings,
    ReplicaSettings,
    RouteSettings,
    RouterSettings,
    SimulateSettings,
    TopSettings,
    UpSettings,
)
_OTHERS = (
    "WARMROUTE_GRAFANA_PUBLISH",
    "WARMROUTE_PROMETHEUS_PUBLISH",
    "WARMROUTE_PUBLISH",
    "WARMROUTE_WORKLOAD",
)
"""Of the Compose files and the Locust file."""


def misspelt_variables(environment: Iterable[str]) -> list[str]:
    """Variables that no command of ours reads, though their names say so; each with what may have been meant."""
    return unknown_variables(environment, _PROGRAMS, _OTHERS)
