"""The fleet in virtual time: exact where it hurries, reproducible, and as the real parts behave."""

from __future__ import annotations

import pytest

from loadtest.records import RequestRecord
from loadtest.simulator.baselines import SIMULATED_POLICIES
from loadtest.simulator.bound import bound_ttft_ms
from loadtest.simulator.clock import VirtualClock
from loadtest.simulator.fleet import FleetChange, FleetSetup, Simulation
from loadtest.simulator.generators import WORKLOADS, generate
from loadtest.simulator.profiles import PROFILES
from loadtest.simulator.traces import (
    ANSWER_TOKEN,
    Conversation,
    ListedPrompt,
    Prompt,
    Run,
    Turn,
    offered_load,
    stretched,
)
from replica.simulated_runner import SimulatedCost
from router.cost_model import service_seconds


def simulate(conversations: list[Conversation], policy: str = "cache-aware", **setup: object) -> Simulation:
    return Simulation(FleetSetup(**setup), SIMULATED_POLICIES[policy], conversations).run()  # type: ignore[arg-type]


def hit_rate(records: list[RequestRecord]) -> float:
    return sum(record.cached_tokens for record in records) / sum(record.prompt_tokens for record in records)


def mean_ttft(records: list[RequestRecord]) -> float:
    assert all(record.ttft_ms is not None for record in records)
    return sum(record.ttft_ms or 0.0 for record in records) / len(records)


def one(prompt_tokens: int, output_tokens: int = 1, at: float = 0.0, token: int = 7) -> Conversation:
    return Conversation(at, (Turn(Prompt.of(Run(token, 1, prompt_tokens)), output_tokens),))


def test_events_happen_in_the_order_of_their_time_and_of_their_making() -> None:
    clock = VirtualClock()
    seen: list[object] = []
    clock.at(2.0, seen.append, "late")
    clock.at(1.0, seen.append, "first")
    clock.at(1.0, seen.append, "second")
    clock.at(0.5, lambda: clock.at(0.1, lambda: seen.append(clock.now)))
    clock.run()
    assert seen == [0.5, "first", "second", "late"], "what is due in the past happens now"


def test_a_prompt_is_its_runs_cut_to_its_length() -> None:
    prompt = Prompt((Run(7, 2, 3), Run(9, 1, 4)), 8)
    assert list(prompt.token_ids()) == [7, 7, 7, 8, 8, 8, 9, 9]
    assert Prompt.of(Run(7, 2, 3)).then(Run(1, 1, 2)).tokens == 8


def test_a_lone_request_takes_what_the_cost_model_says() -> None:
    profile = PROFILES["default"]
    record = simulate([one(5000, 11)], replicas=1).records[0]
    cost = profile.cost
    assert record.ttft_ms == pytest.approx(1e3 * profile.alone_seconds(5000, 5000), rel=1e-3)
    decode = cost.base_seconds + cost.per_decode_seconds + 5005.5 * cost.per_token_context_seconds
    assert record.tpot_ms == pytest.approx(1e3 * decode, rel=1e-3)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("blocks", "host_blocks"), [(80, 0), (80, 200), (600, 0)])
def test_hurrying_changes_no_time_and_no_hit(workload: str, blocks: int, host_blocks: int) -> None:
    """Steady steps are played without the scheduler: not one request may notice."""
    asked = generate(workload, 80, 12.0, seed=3)
    hurried, plain = (
        simulate(asked, fast=fast, replicas=2, blocks=blocks, block_size=256, host_blocks=host_blocks)
        for fast in (True, False)
    )
    assert any(record.error is None for record in plain.records)
    for left, right in zip(hurried.records, plain.records, strict=True):
        assert (left.session, left.turn, left.replica, left.error) == (
            right.session,
            right.turn,
            right.replica,
            right.error,
        )
        assert left.cached_tokens == right.cached_tokens
        assert left.ttft_ms == (right.ttft_ms and pytest.approx(right.ttft_ms, rel=1e-9))
        assert left.e2e_ms == (right.e2e_ms and pytest.approx(right.e2e_ms, rel=1e-9))


@pytest.mark.parametrize("policy", SIMULATED_POLICIES)
def test_every_policy_answers_everything_and_twice_the_same(policy: str) -> None:
    asked = generate("chat", 150, 10.0, seed=1)
    first, second = (simulate(asked, policy, replicas=4, blocks=150, block_size=128) for _ in range(2))
    assert all(record.error is None for record in first.records)
    assert first.records == second.records
    for view in first.replicas.values():
        view.engine.scheduler.check_integrity()
        assert not view.engine.scheduler.has_work


def test_a_conversation_waits_for_its_answers_and_finds_them_cached() -> None:
    opening = Prompt.of(Run(5, 1, 1024))
    second = opening.then(Run(ANSWER_TOKEN, 1, 513), Run(6, 1, 100))
    run = simulate([Conversation(0.0, (Turn(opening, 513), Turn(second, 1, think_seconds=2.0)))], replicas=1)
    before, after = run.records
    assert before.e2e_ms is not None
    assert after.scheduled_seconds == pytest.approx(before.e2e_ms / 1e3 + 2.0)
    assert after.cached_tokens == 1536, "prompt and answer, but for its last token"
    assert run.ideals[1] is not None
    assert run.ideals[1].cached_tokens == 1536


def test_routers_see_a_cache_only_after_it_was_published() -> None:
    asked = [one(4096, at=0.0), one(4096, at=2.0)]
    soon = simulate(asked, replicas=2, publish_seconds=0.02).records[1]
    late = simulate(asked, replicas=2, publish_seconds=60.0).records[1]
    assert soon.predicted_tokens == 4095
    assert late.predicted_tokens == 0


def test_a_request_whose_replica_leaves_before_its_first_token_is_answered_by_another() -> None:
    asked = [one(60_000, 50, token=number + 1) for number in range(4)]
    changes = (FleetChange(0.5, "leave", "r000"), FleetChange(0.6, "join", "r000"))
    run = simulate(asked, replicas=2, changes=changes)
    assert [record.error for record in run.records] == [None] * 4
    broken = simulate([one(1000, 500)], replicas=1, changes=(FleetChange(1.0, "leave", "r000"),)).records[0]
    assert broken.error == "the replica left in the middle of the answer"


def test_a_draining_replica_ends_what_it_has_takes_nothing_more_and_leaves() -> None:
    asked = [one(1000, 500, token=number + 1, at=0.001 * number) for number in range(4)]
    later = [one(1000, token=number + 1, at=3.0 + number) for number in range(4)]
    run = simulate([*asked, *later], replicas=2, changes=(FleetChange(1.0, "drain", "r000"),))
    assert [record.error for record in run.records] == [None] * 8
    assert {record.replica for record in run.records[:4]} == {"r000", "r001"}
    assert {record.replica for record in run.records[4:]} == {"r001"}
    assert list(run.replicas) == ["r001"]
    unused = simulate([one(1000, at=2.0)], replicas=2, changes=(FleetChange(1.0, "drain", "r000"),))
    assert list(unused.replicas) == ["r001"], "one that has nothing to end leaves at once"


def test_what_a_drained_replica_held_is_computed_again_by_all_others_evenly() -> None:
    """No stampede: each prefix goes where least was computed lately, and who follows finds it promised there."""
    drain = 60.0
    asked = generate("shared-prefix", 700, 6.0, seed=1)
    run = simulate(asked, replicas=4, changes=(FleetChange(drain, "drain", "r001"),))
    computed: dict[str, int] = {}
    for record in run.records:
        if drain <= record.scheduled_seconds < drain + 30:
            tokens = record.prompt_tokens - record.cached_tokens
            computed[record.replica] = computed.get(record.replica, 0) + tokens
    assert computed.keys() == {"r000", "r002", "r003"}
    assert max(computed.values()) < 1.25 * sum(computed.values()) / 3


def test_what_fits_no_replica_fails_and_harms_nobody() -> None:
    failed, answered = simulate([one(60_000), one(600, token=8)], replicas=1, blocks=10).records
    assert (failed.error is not None, answered.error) == (True, None)


def test_several_routers_share_the_traffic() -> None:
    run = simulate(generate("chat", 100, 10.0), replicas=3, routers=4)
    assert len(run.placements) == 4
    assert all(record.error is None for record in run.records)


def test_a_host_tier_is_routed_to_and_its_hits_are_predicted() -> None:
    asked = generate("shared-prefix", 400, 12.0, seed=2)
    without, behind = (simulate(asked, replicas=4, blocks=200, host_blocks=blocks).records for blocks in (0, 1600))
    assert hit_rate(behind) > 1.2 * hit_rate(without)
    assert mean_ttft(behind) < 0.8 * mean_ttft(without)
    wrong = sum(abs((record.predicted_tokens or 0) - record.cached_tokens) for record in behind)
    assert wrong < 0.02 * sum(record.prompt_tokens for record in behind)


def test_no_policy_beats_the_bound() -> None:
    asked = generate("rag", 200, 20.0)
    setup = FleetSetup(replicas=2)
    run = Simulation(setup, SIMULATED_POLICIES["cache-aware"], asked).run()
    assert bound_ttft_ms(run.records, run.ideals, setup.profile, 2) <= mean_ttft(run.records)


def test_cache_aware_beats_round_robin_where_prefixes_are_shared() -> None:
    asked = generate("shared-prefix", 600, 20.0)
    ours, theirs = (simulate(asked, policy, replicas=8).records for policy in ("cache-aware", "round-robin"))
    assert hit_rate(ours) > 1.2 * hit_rate(theirs)
    assert mean_ttft(ours) < 0.7 * mean_ttft(theirs)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_generators_make_what_was_asked_for_and_the_same_from_the_same_seed(workload: str) -> None:
    made = generate(workload, 200, 10.0, seed=5)
    assert sum(len(each.turns) for each in made) == 200
    assert made == generate(workload, 200, 10.0, seed=5)
    assert made != generate(workload, 200, 10.0, seed=6)
    starts = [each.start_seconds for each in made]
    assert starts == sorted(starts)


def test_the_offered_load_is_the_share_of_the_fleets_time() -> None:
    profile = PROFILES["default"]
    asked = [one(10_000, at=second) for second in range(101)]
    one_takes = profile.alone_seconds(10_000, 10_000)
    assert offered_load(asked, profile, 4) == pytest.approx(101 * one_takes / 400)
    assert offered_load(stretched(asked, 2.0), profile, 4) == pytest.approx(101 * one_takes / 800)


def test_profiles_are_in_the_order_of_their_hardware() -> None:
    seconds = {name: profile.alone_seconds(8000, 8000) for name, profile in PROFILES.items()}
    assert seconds["h100-llama-8b"] < seconds["l40s-llama-8b"] < seconds["a10-llama-8b"]
    assert PROFILES["default"].cost == SimulatedCost(), "what --engine sim plays"


def test_a_published_price_is_what_a_prefill_takes_alone() -> None:
    """Each of its steps pays the base, which for long prompts is a good part of it."""
    for name, profile in PROFILES.items():
        for uncached, prompt in ((7_300, 9_800), (9_800, 9_800), (2_000, 40_000), (20_000, 20_000)):
            alone = profile.alone_seconds(uncached, prompt)
            told = service_seconds(profile.published, uncached, prompt)
            assert alone < told < 1.26 * alone, (name, uncached, prompt)


def test_one_hot_prefix_on_two_replicas_is_no_slower_than_taking_turns() -> None:
    """Who is nearly done must not be taken for overdue: with equal work, taking turns is the best there is."""
    profile = PROFILES["default"]
    means = []
    for policy in ("cache-aware", "round-robin"):
        total = 0.0
        for seed in range(3):
            asked = generate("hot-prefix", 300, 20.0, seed)
            asked = stretched(asked, offered_load(asked, profile, 2) / 0.8)
            total += mean_ttft(simulate(asked, policy, replicas=2).records)
        means.append(total)
    assert means[0] < 1.001 * means[1]


def test_random_policies_follow_their_seed() -> None:
    asked = generate("chat", 100, 10.0)

    def placed(seed: int) -> list[str]:
        run = Simulation(FleetSetup(replicas=4), SIMULATED_POLICIES["random"], asked, seed=seed).run()
        return [record.replica for record in run.records]

    assert placed(1) == placed(1) != placed(2)


def test_routers_that_share_their_work_decide_as_one() -> None:
    """One hot prefix: routers that see their own work alone all send to the one replica that holds it."""
    asked = generate("hot-prefix", 200, 6.0, seed=1)
    alone, apart = (mean_ttft(simulate(asked, replicas=4, routers=routers).records) for routers in (1, 8))
    shared = mean_ttft(simulate(asked, replicas=4, routers=8, share_seconds=0.025).records)
    assert apart > 1.5 * alone
    assert shared < 1.15 * alone


def test_a_turn_that_is_due_before_its_answer_waits_for_it_and_the_wait_counts() -> None:
    prompt = Prompt.of(Run(7, 1, 5000))
    late, early = (
        simulate(
            [Conversation(0.0, (Turn(prompt, 1), Turn(prompt.then(Run(8, 1, 512)), 1, due_seconds=due)))], replicas=1
        )
        for due in (60.0, 0.1)
    )
    first, second = late.records
    assert (second.scheduled_seconds, second.cached_tokens > 0) == (60.0, True)
    assert second.ttft_ms is not None
    assert first.ttft_ms is not None
    waited = early.records[1]
    assert waited.scheduled_seconds == 0.1
    assert waited.ttft_ms == pytest.approx(second.ttft_ms + first.ttft_ms - 100.0, rel=0.01)


def test_a_prompt_told_token_by_token_is_computed_like_one_told_by_runs() -> None:
    told = Prompt.of(Run(7, 3, 700))
    by_runs = simulate([one(2100), Conversation(1.0, (Turn(told, 5),))], replicas=1).records
    listed = simulate([one(2100), Conversation(1.0, (Turn(ListedPrompt(told.token_ids()), 5),))], replicas=1).records
    assert listed == by_runs
