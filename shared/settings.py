"""One dataclass per program; its flags, variables and TOML keys all derive from it (see `settings_sources`).

Made directly, a class has its defaults: `RouterSettings(port=0)`. From the command line: `parse(RouterSettings, argv,
os.environ, "warmroute router")`.
"""

from __future__ import annotations

from shared.settings_cluster import DoctorSettings, UpSettings
from shared.settings_fields import BENCH_NAMES, POLICY_NAMES
from shared.settings_proof import BenchRouterSettings, BenchSettings, CompareSettings, SimulateSettings
from shared.settings_replica import ReplicaSettings
from shared.settings_router import RouterSettings, RouteSettings, TopSettings
from shared.settings_sources import SettingsError, parse

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
    "parse",
]
