"""A measurement that was made several times: never a number without how far its repeats lie apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

__all__ = ["Spread"]


class Spread(NamedTuple):
    """The median of all repeats, and the least and the most of them."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def shown(self, form: Callable[[float], str]) -> str:
        """`12.0 (11.5-14.1)`"""
        return f"{form(self.median)} ({form(self.least)}-{form(self.most)})"
