"""The objective that goodput is counted by: a request is good if it kept within the limits and did not fail."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loadtest.records import RequestRecord
from shared.settings import SettingsError

__all__ = ["Objective"]

_NAMES = {"ttft": "ttft_seconds", "tpot": "tpot_seconds"}


@dataclass(frozen=True, slots=True)
class Objective:
    """The most time to the first token, from the scheduled arrival, and between two tokens on average."""

    ttft_seconds: float = 1.0
    tpot_seconds: float = 0.1

    @classmethod
    def parse(cls, told: str) -> Objective:
        """Of `ttft=1,tpot=0.1`; what is left out is not limited. Raises SettingsError."""
        limits = dict.fromkeys(_NAMES.values(), math.inf)
        for part in told.split(","):
            name, _, seconds = part.strip().partition("=")
            try:
                limits[_NAMES[name]] = float(seconds)
            except (KeyError, ValueError):
                raise SettingsError(f"--objective: {told!r} is not like ttft=1,tpot=0.1 (seconds)") from None
            if not limits[_NAMES[name]] > 0:
                raise SettingsError(f"--objective: {name} must be more than 0 seconds")
        return cls(**limits)

    def met_by(self, record: RequestRecord) -> bool:
        """A single token has no time between tokens: it counts by its first."""
        return (
            record.error is None
            and record.ttft_ms is not None
            and record.ttft_ms <= self.ttft_seconds * 1e3
            and (record.tpot_ms is None or record.tpot_ms <= self.tpot_seconds * 1e3)
        )

    def __str__(self) -> str:
        limits = {"first token": self.ttft_seconds, "between tokens": self.tpot_seconds}
        told = [f"{what} within {seconds:g} s" for what, seconds in limits.items() if math.isfinite(seconds)]
        return ", ".join(told)
