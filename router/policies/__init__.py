"""Policies by name, one file each."""

from __future__ import annotations

import random
from collections.abc import Callable

from router.policies.base import Policy
from router.policies.cache_aware import CacheAware
from router.policies.consistent_hash import ConsistentHash
from router.policies.least_loaded import LeastLoaded
from router.policies.longest_prefix import LongestPrefix
from router.policies.prefix_tree import PrefixTree
from router.policies.random_choice import RandomChoice
from router.policies.round_robin import RoundRobin
from router.policies.session import Session
from router.policies.two_choices import TwoChoices

__all__ = ["POLICIES", "UnknownPolicyError", "build_policy"]

POLICIES: dict[str, Callable[[random.Random], Policy]] = {
    CacheAware.name: lambda rng: CacheAware(),
    RoundRobin.name: lambda rng: RoundRobin(),
    RandomChoice.name: RandomChoice,
    LeastLoaded.name: lambda rng: LeastLoaded(),
    TwoChoices.name: TwoChoices,
    ConsistentHash.name: lambda rng: ConsistentHash(),
    LongestPrefix.name: lambda rng: LongestPrefix(),
    PrefixTree.name: lambda rng: PrefixTree(),
    Session.name: lambda rng: Session(),
}


class UnknownPolicyError(ValueError):
    """The message names the policies there are."""


def build_policy(name: str, rng: random.Random | None = None) -> Policy:
    """A fresh policy; `rng` makes the random ones reproducible."""
    factory = POLICIES.get(name)
    if factory is None:
        raise UnknownPolicyError(f"no policy is called {name!r}; choose one of: {', '.join(POLICIES)}")
    return factory(rng or random.Random())
