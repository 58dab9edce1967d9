"""The whole placement: prices, promises, trust, the ladder, and the books it keeps."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.block_index import BlockIndex
from router.guards import Guards
from router.ledger import Standing
from router.placement import EXACT, Attempt, Decision, NoReplicaError, Placement, View
from router.policies import POLICIES, build_policy
from router.policies.base import Request
from shared.blocks import PublishedKey
from shared.fleet_state import CostCoefficients, ReplicaLoad

COST = CostCoefficients(base_seconds=0.01, per_token_seconds=2e-4, per_token_context_seconds=0.0)
BLOCK = 16


@dataclass
class FakeReplica:
    id: str
    accepting: bool = True
    publishes: bool = True
    replica_class: str = "test"
    load: ReplicaLoad | None = None
    cost: CostCoefficients | None = COST
    onload_seconds_per_token: float | None = None


@dataclass
class Cluster:
    """A placement over replicas whose caches a test fills by hand."""

    replicas: list[FakeReplica]
    policy: str = "cache-aware"
    guards: Guards = field(default_factory=Guards)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.index = BlockIndex()
        self.placement = Placement(
            self.index,
            build_policy(self.policy, random.Random(7)),
            build_policy("consistent-hash"),
            guards=self.guards,
        )

    def hold(self, replica_id: str, keys: list[PublishedKey]) -> None:
        self.index.apply(replica_id, keys, [])

    def decide(self, asked: Request, excluded: tuple[str, ...] = (), view: View = EXACT) -> Decision:
        return self.placement.decide(asked, self.replicas, self.now, excluded=excluded, view=view)

    def send(self, asked: Request, view: View = EXACT) -> Attempt:
        decision = self.decide(asked, view=view)
        replica = next(replica for replica in self.replicas if replica.id == decision.chosen.replica_id)
        return self.placement.dispatch(asked, replica, decision, self.now)

    def serve(self, asked: Request) -> str:
        """Send, answer as an engine would that caches it all, and end."""
        attempt = self.send(asked)
        chosen = attempt.decision.chosen
        self.now += chosen.service_seconds
        self.placement.first_token(attempt, self.now, chosen.matched_tokens)
        self.hold(chosen.replica_id, asked.keys)
        self.placement.finish(attempt, self.now)
        return chosen.replica_id


def cluster(count: int = 2, **settings: object) -> Cluster:
    return Cluster([FakeReplica(f"r{number}") for number in range(count)], **settings)  # type: ignore[arg-type]


def chain(*parts: int, blocks: int = 10) -> list[PublishedKey]:
    """A chained key list: parts with the same first numbers share their first keys."""
    keys = []
    for depth in range(1, len(parts) + 1):
        stem = hash(parts[:depth]) & 0xFFFFFFFF
        keys += [PublishedKey((stem << 16) | number) for number in range(blocks)]
    return keys


def ask(keys: list[PublishedKey], tail_tokens: int = 5, **changes: object) -> Request:
    fields: dict[str, object] = {"prompt_tokens": BLOCK * len(keys) + tail_tokens, "keys": keys, "block_size": BLOCK}
    return Request(**{**fields, **changes})  # type: ignore[arg-type]


def test_replicas_warmed_with_different_prefixes_route_by_content() -> None:
    fleet = cluster(2)
    fleet.hold("r0", chain(1))
    fleet.hold("r1", chain(2))
    for tail in range(20):
        assert fleet.decide(ask(chain(1, 100 + tail))).chosen.replica_id == "r0"
        assert fleet.decide(ask(chain(2, 100 + tail))).chosen.replica_id == "r1"


def test_the_price_is_wait_plus_service_over_spare_plus_guard() -> None:
    fleet = cluster(2, guards=Guards(decode=False))
    fleet.hold("r0", chain(1))
    decision = fleet.decide(ask(chain(1, 2)))
    by_id = {candidate.replica_id: candidate for candidate in decision.candidates}
    assert by_id["r0"].matched_tokens == 160
    assert by_id["r0"].service_seconds == pytest.approx(0.01 + 2e-4 * 165)
    assert by_id["r1"].service_seconds == pytest.approx(0.01 + 2e-4 * 325)
    assert by_id["r0"].cost_seconds == pytest.approx(by_id["r0"].service_seconds)


def test_a_backlog_makes_a_second_of_work_dearer_for_everyone() -> None:
    fleet = cluster(2, guards=Guards(eviction=False))
    idle_cost = fleet.decide(ask(chain(1))).chosen.cost_seconds
    attempts = [fleet.send(ask(chain(10 + number))) for number in range(2)]
    fleet.now = 60.0
    for attempt in attempts:
        fleet.placement.finish(attempt, fleet.now)
    assert fleet.decide(ask(chain(1))).chosen.cost_seconds == pytest.approx(idle_cost * 2.718281828, rel=1e-3)


def test_a_hit_is_capped_at_the_prompt_less_one() -> None:
    fleet = cluster(1)
    fleet.hold("r0", chain(1))
    assert fleet.decide(ask(chain(1), tail_tokens=0)).predicted_tokens == 159


def test_a_prompt_shorter_than_a_block_goes_somewhere_and_predicts_nothing() -> None:
    fleet = cluster(4)
    placed = Counter(
        fleet.decide(ask([], tail_tokens=3, affinity=bytes([number]))).chosen.replica_id for number in range(100)
    )
    assert set(placed) == {"r0", "r1", "r2", "r3"}
    assert fleet.decide(ask([], tail_tokens=0)).predicted_tokens == 0


def test_a_burst_with_one_cold_prefix_goes_where_it_is_promised() -> None:
    fleet = cluster(4)
    home = fleet.send(ask(chain(1, blocks=1000))).decision.chosen.replica_id
    for number in range(5):
        follower = fleet.send(ask(chain(1, blocks=1000), tail_tokens=number)).decision
        assert (follower.chosen.replica_id, follower.reason) == (home, "promised")
        assert follower.sentence.count("partly promised") == 1


def test_a_burst_spreads_when_waiting_costs_more_than_computing_again() -> None:
    fleet = cluster(4)
    used = Counter(
        fleet.send(ask(chain(1, 100 + number, blocks=50))).decision.chosen.replica_id for number in range(40)
    )
    assert set(used) == {"r0", "r1", "r2", "r3"}
    assert max(used.values()) <= 14


def test_promises_of_a_failed_request_are_dropped() -> None:
    fleet = cluster(2)
    attempt = fleet.send(ask(chain(1)))
    assert fleet.decide(ask(chain(1))).chosen.matched_tokens or fleet.decide(ask(chain(1))).candidates
    fleet.placement.finish(attempt, fleet.now)
    assert all(candidate.matched_tokens == 0 for candidate in fleet.decide(ask(chain(1))).candidates)


def test_paced_traffic_with_disjoint_prefixes_spreads() -> None:
    fleet = cluster(4)
    used: Counter[str] = Counter()
    for number in range(400):
        fleet.now += 5.0
        used[fleet.serve(ask(chain(1000 + number)))] += 1
    assert min(used[replica.id] for replica in fleet.replicas) > 60


def test_what_host_memory_holds_costs_its_transfer() -> None:
    fleet = cluster(3)
    prompt = chain(1)
    fleet.index.apply("r0", stored=prompt[:4], host_stored=prompt[4:8])
    fleet.replicas[0].onload_seconds_per_token = 5e-5
    fleet.index.apply("r1", stored=prompt[:6])
    decision = fleet.decide(ask(prompt))
    hosted, device, cold = sorted(decision.candidates, key=lambda candidate: candidate.replica_id)
    assert (hosted.matched_tokens, hosted.host_tokens, hosted.predicted_tokens) == (64, 64, 128)
    assert hosted.service_seconds == pytest.approx(0.01 + 2e-4 * (165 - 128) + 5e-5 * 64)
    assert (device.host_tokens, device.predicted_tokens) == (0, 96)
    assert hosted.service_seconds < device.service_seconds < cold.service_seconds
    assert (decision.chosen, decision.predicted_tokens) == (hosted, 128)
    assert "64 of 165 prompt tokens cached there and 64 in its host memory" in decision.sentence
    attempt = fleet.placement.dispatch(ask(prompt), fleet.replicas[0], decision, 0.0)
    assert attempt.dispatch.uncached == 165 - 128
    assert list(attempt.dispatch.promised) == prompt[4:], "what comes back will be there for others too"
    follower = fleet.decide(ask(prompt), excluded=("r1", "r2")).chosen
    assert (follower.matched_tokens, follower.host_tokens) == (160, 0)


def test_host_memory_counts_for_nothing_where_computing_is_faster() -> None:
    fleet = cluster(1)
    fleet.index.apply("r0", host_stored=chain(1))
    fleet.replicas[0].onload_seconds_per_token = 3e-4
    slow = fleet.decide(ask(chain(1))).chosen
    assert slow.predicted_tokens == 0
    assert slow.service_seconds == pytest.approx(0.01 + 2e-4 * 165)
    fleet.replicas[0].onload_seconds_per_token = None
    unmeasured = fleet.decide(ask(chain(1))).chosen
    assert unmeasured.host_tokens == 160
    assert unmeasured.service_seconds == pytest.approx(0.01 + 2e-4 * 5 + 2e-5 * 160), (
        "a tenth of computing, till measured"
    )
    assert fleet.decide(ask(chain(1), tail_tokens=0)).chosen.host_tokens == 159, "the last token is always computed"


def test_a_replica_whose_hits_never_come_is_no_longer_believed() -> None:
    fleet = cluster(2)
    fleet.hold("r0", chain(1, blocks=100))
    for _ in range(60):
        attempt = fleet.placement.dispatch(
            ask(chain(1, blocks=100)), fleet.replicas[0], fleet.decide(ask(chain(1, blocks=100)), ("r1",)), fleet.now
        )
        fleet.placement.first_token(attempt, fleet.now, cached_tokens=0)
        fleet.placement.finish(attempt, fleet.now)
    decision = fleet.decide(ask(chain(1, blocks=100)))
    doubted = next(candidate for candidate in decision.candidates if candidate.replica_id == "r0")
    assert doubted.trust < 0.1
    assert doubted.service_seconds > 0.9 * max(candidate.service_seconds for candidate in decision.candidates)
    there = fleet.decide(ask(chain(1, blocks=100)), excluded=("r1",))
    assert (there.view, there.ladder) == ("exact", "discounted")
    assert "1600 of 1605 prompt tokens cached there, of which 5% are believed" in there.sentence
    assert fleet.decide(ask(chain(2)), excluded=("r1",)).ladder == "exact", "there is nothing to doubt"
    assert fleet.decide(ask(chain(1, blocks=100)), excluded=("r0",)).ladder == "exact"
    assert fleet.decide(ask(chain(1, blocks=100)), ("r1",), View("stale", usable=True)).ladder == "stale"


def test_a_promise_that_came_too_late_costs_no_trust() -> None:
    fleet = cluster(1)
    fleet.send(ask(chain(1)))
    second = fleet.send(ask(chain(1)))
    assert second.decision.predicted_tokens == 160
    fleet.placement.first_token(second, 1.0, cached_tokens=0)
    assert fleet.placement.trust.factor("r0") == 1.0


def test_a_silent_replica_is_matched_by_what_was_sent_to_it() -> None:
    fleet = Cluster([FakeReplica("r0", publishes=False), FakeReplica("r1", publishes=False)])
    first = fleet.send(ask(chain(1)))
    fleet.placement.first_token(first, 1.0)
    fleet.placement.finish(first, 2.0)
    fleet.now = 3.0
    assert fleet.decide(ask(chain(1, 2))).chosen.replica_id == first.decision.chosen.replica_id
    assert fleet.decide(ask(chain(1, 2))).predicted_tokens == 160


def test_without_a_usable_view_the_fallback_decides_and_stale_keys_do_not() -> None:
    fleet = cluster(4)
    fleet.hold("r0", chain(1))
    blind = fleet.decide(ask(chain(1)), view=View("hash", usable=False))
    assert (blind.policy, blind.view, blind.predicted_tokens) == ("consistent-hash", "hash", 0)
    round_robin = cluster(2, policy="round-robin")
    assert round_robin.decide(ask(chain(1)), view=View("hash", usable=False)).policy == "round-robin"


def test_a_request_placed_by_another_policy_takes_nobodys_turn() -> None:
    fleet = cluster(2, policy="round-robin")
    asked = ask(chain(1))
    decision = fleet.placement.decide(asked, fleet.replicas, 0.0, policy=build_policy("least-loaded"))
    fleet.placement.dispatch(asked, fleet.replicas[0], decision, 0.0)
    assert fleet.decide(asked).chosen.replica_id == "r0"


def test_the_learned_cost_comes_from_first_token_times() -> None:
    fleet = Cluster([FakeReplica("r0", cost=None)])
    rng = random.Random(0)
    for number in range(200):
        asked = ask(chain(10_000 + number, blocks=rng.randrange(1, 400)))
        attempt = fleet.send(asked)
        fleet.now += 0.002 + 1e-3 * asked.prompt_tokens
        fleet.placement.first_token(attempt, fleet.now, cached_tokens=0)
        fleet.placement.finish(attempt, fleet.now)
    assert fleet.decide(ask(chain(1, blocks=100))).chosen.service_seconds == pytest.approx(1.6, rel=0.05)


def test_guards_price_others_and_can_be_switched_off() -> None:
    full = ReplicaLoad(running=4, waiting=0, queued_prefill_tokens=0, free_blocks=2, evictable_blocks=5)
    standing = Standing(active=3, decoding=3, filled_tokens=2000.0)
    # 3 sequences decode through one step, 3 blocks fit nowhere, and twice as much as usual came in here.
    priced = Guards().seconds(COST, full, standing, 160, BLOCK, 1000.0)
    assert priced == pytest.approx(2e-4 * (3 + 3 * BLOCK + 160 * 0.25 * 2))
    off = Guards(decode=False, pressure=False, eviction=False)
    assert off.seconds(COST, full, standing, 160, BLOCK, 1000.0) == 0.0
    no_load = Guards(decode=False, eviction=False).seconds(COST, None, standing, 160, BLOCK, 1000.0)
    assert no_load == 0.0, "an unknown load is not a pressure"


def test_cold_prompts_go_where_the_least_came_in_lately() -> None:
    """Nobody is busy: by hash alone one replica would get more conversations than it can keep."""
    fleet = cluster(2)
    placed: Counter[str] = Counter()
    for number in range(40):
        fleet.now += 5.0
        placed[fleet.serve(ask(chain(number, blocks=40)))] += 1
    assert abs(placed["r0"] - placed["r1"]) <= 4, placed


def test_what_fits_nowhere_goes_where_it_fits() -> None:
    fleet = cluster(2)
    fleet.replicas[0].load = ReplicaLoad(free_blocks=0, evictable_blocks=5)
    fleet.replicas[1].load = ReplicaLoad(free_blocks=0, evictable_blocks=100)
    assert all(fleet.decide(ask(chain(number))).chosen.replica_id == "r1" for number in range(20))


def test_conversations_with_one_system_prompt_do_not_all_go_to_its_first_holder() -> None:
    """Nobody is ever busy, and its holder is always cheapest for the moment; what follows would all go there."""
    fleet = cluster(4)
    placed: Counter[str] = Counter()
    for number in range(40):
        fleet.now += 5.0
        opening = chain(0, blocks=20) + chain(100 + number, blocks=60)
        placed[fleet.serve(ask(opening))] += 1
    assert len(placed) >= 3, placed
    assert max(placed.values()) <= 20, placed


def test_the_sentence_names_the_choice_its_price_and_the_best_other() -> None:
    fleet = cluster(2)
    fleet.hold("r1", chain(1))
    sentence = fleet.decide(ask(chain(1))).sentence
    assert sentence.startswith("r1 by cache-aware (warm): 160 of 165 prompt tokens cached there")
    assert "the best other is r0" in sentence
    assert fleet.decide(ask(chain(1)), excluded=("r0",)).sentence.endswith("no other replica could take it")


def test_nobody_left_is_said_so() -> None:
    fleet = cluster(2)
    fleet.replicas[0].accepting = False
    with pytest.raises(NoReplicaError):
        fleet.decide(ask(chain(1)), excluded=("r1",))


@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 40))
def test_any_history_keeps_the_books_and_never_uses_who_must_not_be_used(policy: str, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    fleet = cluster(rng.randrange(1, 5), policy=policy)
    alive: list[Attempt] = []
    for _ in range(steps):
        fleet.now += rng.random() * 0.2
        for replica in fleet.replicas:
            replica.accepting = rng.random() < 0.8
        excluded = tuple(replica.id for replica in fleet.replicas if rng.random() < 0.2)
        asked = ask(chain(*itertools.accumulate(rng.randrange(3) for _ in range(rng.randrange(1, 4)))))
        allowed = {replica.id for replica in fleet.replicas if replica.accepting} - set(excluded)
        if not allowed:
            with pytest.raises(NoReplicaError):
                fleet.decide(asked, excluded)
            continue
        decision = fleet.decide(asked, excluded)
        assert {candidate.replica_id for candidate in decision.candidates} == allowed
        assert decision.chosen in decision.candidates
        assert decision.chosen.replica_id in allowed
        assert all(0 <= c.held_tokens <= c.matched_tokens < asked.prompt_tokens for c in decision.candidates)
        assert all(c.cost_seconds >= c.wait_seconds + c.service_seconds > 0 for c in decision.candidates)
        if policy not in ("random", "two-choices"):
            assert fleet.decide(asked, excluded) == decision, "same input, same decision"
        replica = next(replica for replica in fleet.replicas if replica.id == decision.chosen.replica_id)
        alive.append(fleet.placement.dispatch(asked, replica, decision, fleet.now))
        if rng.random() < 0.6:
            attempt = alive.pop(rng.randrange(len(alive)))
            if rng.random() < 0.8:
                fleet.placement.first_token(
                    attempt, fleet.now, rng.choice([None, 0, attempt.decision.predicted_tokens])
                )
                fleet.hold(attempt.decision.chosen.replica_id, attempt.request.keys)
            fleet.placement.finish(attempt, fleet.now)
        fleet.placement.ledger.check_integrity()
    for attempt in alive:
        fleet.placement.finish(attempt, fleet.now)
    fleet.placement.ledger.check_integrity()
    assert fleet.placement.ledger.total_active == 0


def test_while_the_view_is_stale_what_was_answered_counts_as_held_until_the_view_is_exact_again() -> None:
    fleet = cluster(2)
    stale = View("stale", usable=True)
    fleet.hold("r0", chain(2))
    attempt = fleet.send(ask(chain(1)), stale)
    fleet.placement.first_token(attempt, fleet.now, 0)
    fleet.placement.finish(attempt, fleet.now)
    again = fleet.decide(ask(chain(1)), view=stale)
    assert again.chosen.replica_id == attempt.decision.chosen.replica_id
    assert again.chosen.held_tokens == 160
    assert fleet.decide(ask(chain(2)), view=stale).predicted_tokens == 160, "the last view counts as well"
    unanswered = fleet.send(ask(chain(3)), stale)
    fleet.placement.finish(unanswered, fleet.now)
    assert fleet.decide(ask(chain(3)), view=stale).predicted_tokens == 0
    assert fleet.decide(ask(chain(1))).predicted_tokens == 0, "the replica says what it holds"
    assert fleet.decide(ask(chain(1)), view=stale).predicted_tokens == 0, "and what it said last is believed"
