"""Prices against the plain formula, replica by replica, over fleets in any state."""

from __future__ import annotations

import random
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from router.block_index import BlockIndex
from router.cost_model import CostModel, onload_seconds, service_seconds
from router.guards import Guards
from router.ledger import Ledger
from router.policies.base import Candidate, Request
from router.pricing import BLIND, EXACT, STALE, Pricing, View
from router.trust import Trust
from shared.blocks import PublishedKey
from shared.fleet_state import CostCoefficients, ReplicaLoad
from tests.router.test_placement import FakeReplica

BLOCK = 16
PROMPT = [PublishedKey(number * 7919) for number in range(1, 41)]
LEARNED = CostCoefficients(0.02, 1e-4, 1e-8)


class AnyFleet:
    """Replicas with random caches in both tiers, work under way, trust, loads and costs."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.now = 10.0
        self.held: dict[str, int] = {}
        self.resident: dict[str, int] = {}
        self.sent: dict[str, int] = {}
        self.index, self.ledger, self.trust, self.guards = BlockIndex(), Ledger(), Trust(), Guards()
        self.cost_model = CostModel(LEARNED)
        self.pricing = Pricing(self.index, self.ledger, self.cost_model, self.trust, self.guards)
        self.replicas = [self._replica(f"r{number}") for number in range(rng.randint(1, 7))]

    def _replica(self, name: str) -> FakeReplica:
        rng, now = self.rng, self.now
        replica = FakeReplica(
            name,
            publishes=rng.random() < 0.8,
            load=rng.choice([None, ReplicaLoad(free_blocks=rng.randint(0, 20), evictable_blocks=rng.randint(0, 10))]),
            cost=rng.choice([None, CostCoefficients(rng.random() / 100, rng.random() / 1e4, rng.random() / 1e8)]),
            onload_seconds_per_token=rng.choice([None, rng.random() / 1e4]),
        )
        device = rng.randint(0, len(PROMPT)) * rng.randint(0, 1)
        resident = rng.randint(device, len(PROMPT)) if rng.random() < 0.5 else device
        self.index.apply(name, stored=PROMPT[:device], host_stored=PROMPT[device:resident])
        self.held[name], self.resident[name] = device, resident
        for _ in range(rng.randint(0, 3)):
            promised = PROMPT[device : rng.randint(device, len(PROMPT))] if rng.random() < 0.4 else []
            dispatch = self.ledger.dispatch(
                name,
                now - rng.random(),
                service_seconds=rng.random(),
                uncached_tokens=rng.randint(1, 900),
                promised=promised,
            )
            if rng.random() < 0.4:
                self.ledger.first_token(dispatch, now)
        for _ in range(rng.randint(0, 5)):
            self.trust.observe(name, 500, rng.choice([0, 250, 500]), BLOCK)
        if rng.random() < 0.5:
            self.sent[name] = rng.randint(1, len(PROMPT))
            self.pricing.computed(replica, PROMPT[: self.sent[name]], STALE.step, now)
        return replica

    def plainly(self, request: Request, view: View, corrections: Mapping[str, int]) -> list[Candidate]:
        standings = {replica.id: self.ledger.standing(replica.id, self.now) for replica in self.replicas}
        mean_filled = sum(standing.filled_tokens for standing in standings.values()) / len(standings)
        rho = min(0.9, sum(standing.backlog_share for standing in standings.values()) / len(standings))
        priced = []
        for replica in self.replicas:
            name, standing, cost = replica.id, standings[replica.id], replica.cost or LEARNED
            held = 0
            if replica.publishes:
                held = min(self.held[name], len(request.keys)) if view.usable else 0
            if not replica.publishes or view.step != "exact":
                held = max(held, min(self.sent.get(name, 0), len(request.keys)))
            most = min(corrections.get(name, request.prompt_tokens), request.prompt_tokens - 1)
            matched = min(self.ledger.promised_depth(name, request.keys, held) * BLOCK, most)
            trust = self.trust.factor(name)
            uncached = request.prompt_tokens - int(matched * trust)
            ways = [(service_seconds(cost, uncached, request.prompt_tokens), 0, uncached)]
            in_host = min(min(self.resident[name], len(request.keys)) * BLOCK, most) - matched
            if replica.publishes and view.usable and in_host > 0:
                believed = int(in_host * trust)
                onload = onload_seconds(cost, replica.onload_seconds_per_token, believed)
                service = service_seconds(cost, uncached - believed, request.prompt_tokens)
                ways.append((service + onload, in_host, uncached - believed))
            service, host, uncached = min(ways, key=lambda way: way[0])
            guard = self.guards.seconds(cost, replica.load, standing, uncached, BLOCK, mean_filled)
            total = standing.wait_seconds + service * (1 / (1 - rho)) + guard
            held_tokens = min(held * BLOCK, most)
            priced.append(
                Candidate(
                    name,
                    held,
                    held_tokens,
                    matched,
                    trust,
                    standing.wait_seconds,
                    service,
                    guard,
                    total,
                    standing.active,
                    host,
                )
            )
        return priced


@given(seed=st.integers(0, 2**32), view=st.sampled_from([EXACT, STALE, BLIND]))
@settings(max_examples=300, deadline=None)
def test_every_candidate_costs_what_the_formula_says(seed: int, view: View) -> None:
    fleet = AnyFleet(seed)
    blocks = fleet.rng.randint(0, len(PROMPT))
    request = Request(blocks * BLOCK + fleet.rng.randint(0 if blocks else 1, 15), PROMPT[:blocks], BLOCK)
    corrections = {"r0": fleet.rng.randint(0, 300)} if fleet.rng.random() < 0.3 else {}
    expected = fleet.plainly(request, view, corrections)
    priced = fleet.pricing.price(request, fleet.replicas, fleet.now, view, corrections)
    assert priced == expected
