"""From engines through a real Redis to the index: whatever goes wrong in between, the router ends up right."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import redis

from shared.blocks import checksum, published_key
from shared.fleet_records import encode_delta
from shared.fleet_state import Delta, LogPosition
from tests.fleet_members import BLOCK_SIZE, Member, make_record
from tests.helpers import eventually
from tests.router.following import following

LOG = "warmroute:{default}:log:r1"
BLOCKS = "warmroute:{default}:blocks:r1"


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


async def test_two_replicas_with_different_contents_are_told_apart(redis_url: str) -> None:
    async with following(redis_url) as router, Member(redis_url, "r1") as one, Member(redis_url, "r2") as two:
        await eventually(lambda: router.knows(one, two))
        one.compute(range(40))
        two.compute([*range(20), *range(100, 140)])
        await eventually(lambda: router.knows(one, two))
        assert router.index.held_prefixes(one.keys(range(60))) == {"r1": 10, "r2": 5}
        assert router.index.held_prefixes(one.keys([*range(20), *range(100, 200)])) == {"r1": 5, "r2": 15}
        assert router.follower.view.step == "exact"


async def test_a_router_started_late_learns_every_resident_block(redis_url: str) -> None:
    async with Member(redis_url) as member:
        for conversation in range(50):
            member.compute(range(conversation * 1000, conversation * 1000 + 80))
        await eventually(lambda: member.publisher.current and not member.publisher._changed)
        async with following(redis_url) as router:
            await eventually(lambda: router.knows(member))
            assert router.follower.reread == {"joined": 1}
            member.compute(range(5000, 5080))
            await eventually(lambda: router.knows(member))
            assert router.follower.reread == {"joined": 1}


async def test_the_same_delta_read_twice_changes_nothing(redis_url: str) -> None:
    async with following(redis_url) as router, Member(redis_url) as member:
        member.compute(range(40))
        await eventually(lambda: router.knows(member))
        member.compute(range(100, 140))
        await eventually(lambda: router.knows(member))
        position = router.follower.position("r1")
        assert position is not None
        router.follower._positions["r1"] = LogPosition(position.epoch, position.version - 1)
        await eventually(lambda: router.knows(member))
        assert router.follower.reread == {"joined": 1}
        router.index.check_integrity()


async def test_a_gap_in_the_log_makes_that_replica_be_read_again_and_no_other(redis_url: str, client: Any) -> None:
    async with following(redis_url) as router, Member(redis_url) as member, Member(redis_url, "r2") as other:
        member.compute(range(40))
        other.compute(range(40))
        await eventually(lambda: router.knows(member, other))
        position = router.follower.position("r1")
        assert position is not None
        # As if the entry with version + 1 had been trimmed before we came to it.
        member.publisher._position = LogPosition(position.epoch, position.version + 1)
        member.compute(range(100, 140))
        await eventually(lambda: router.knows(member, other))
        assert router.follower.reread == {"joined": 2, "gap": 1}


async def test_a_wrong_checksum_makes_the_replica_be_read_again(redis_url: str) -> None:
    async with following(redis_url) as router, Member(redis_url) as member:
        member.compute(range(40))
        await eventually(lambda: router.knows(member))
        router.index.apply("r1", removed=member.keys(range(40))[-1:])  # the index lost a block
        member.compute(range(100, 140))
        await eventually(lambda: router.knows(member))
        assert router.follower.reread == {"joined": 1, "checksum": 1}


async def test_a_log_entry_of_garbage_heals(redis_url: str, client: Any) -> None:
    async with following(redis_url) as router, Member(redis_url) as member:
        member.compute(range(40))
        await eventually(lambda: router.knows(member))
        epoch, version = member.publisher.position
        client.xadd(LOG, {"stored": b"not keys"[:5]}, id=f"{epoch}-{version + 1}")
        await eventually(lambda: member.publisher.republished == 2)
        await eventually(lambda: router.knows(member))
        assert router.follower.reread["malformed"] == 1


async def test_a_trimmed_and_a_deleted_log_heal(redis_url: str, client: Any) -> None:
    async with following(redis_url) as router, Member(redis_url) as member:
        member.compute(range(40))
        await eventually(lambda: router.knows(member))
        client.xtrim(LOG, maxlen=0)
        await eventually(lambda: member.publisher.republished == 2)
        await eventually(lambda: router.knows(member))
        client.delete(LOG)
        member.compute(range(100, 140))
        await eventually(lambda: router.knows(member))


async def test_a_believable_entry_of_an_absurd_epoch_blinds_nobody_for_good(redis_url: str, client: Any) -> None:
    async with following(redis_url) as router, Member(redis_url) as member:
        member.compute(range(40))
        await eventually(lambda: router.knows(member))
        absurd = Delta(1 << 63, 0, count=10, checksum=checksum(member.keys(range(40))))
        client.xadd(LOG, dict(encode_delta(absurd)), id=f"{absurd.epoch}-{absurd.version}")
        await eventually(lambda: router.follower.position("r1") == absurd.position)
        member.compute(range(100, 140))
        await eventually(lambda: router.knows(member))


async def test_a_set_changed_behind_the_publishers_back_is_not_believed_by_a_new_router(
    redis_url: str, client: Any
) -> None:
    async with Member(redis_url) as member:
        member.compute(range(40))
        await eventually(lambda: client.scard(BLOCKS) == 10)
        client.srem(BLOCKS, client.srandmember(BLOCKS))
        async with following(redis_url) as router:
            await eventually(lambda: router.knows(member))
            assert len(router.keys_of("r1")) == 10


@pytest.mark.parametrize("kind", ["blocks", "host", "log"])
async def test_one_key_of_the_wrong_type_makes_one_cache_unknown_and_the_others_stay_exact(
    redis_url: str, client: Any, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    async with following(redis_url) as router, Member(redis_url) as other:
        other.compute(range(40))
        async with Member(redis_url, "r2") as frozen:
            frozen.compute(range(40))
            await eventually(lambda: router.knows(frozen, other))
            await frozen.crash()  # nobody mends it, and its lease has some seconds left
            key = f"warmroute:{{default}}:{kind}:r2"
            client.delete(key)
            client.rpush(key, "not ours")
            router.follower._doubt("r2", "gap")
            await eventually(lambda: router.index.held_prefixes(other.keys(range(40))) == {"r1": 10})
            other.compute(range(100, 140))
            await eventually(lambda: router.knows(other))
            assert router.follower.view.step == "exact"
            assert router.states()["r2"] == "accepting"
    assert "Redis is away" not in caplog.text
    told = "the cache of replica 'r2' is unknown until it publishes again: somebody else wrote to"
    assert caplog.text.count(f"{told} warmroute:{{default}}:{kind}:r2; DEL it") == 1


async def test_a_log_replaced_by_a_list_does_not_hold_up_the_logs_of_the_others(
    redis_url: str, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(redis_url) as router, Member(redis_url) as one, Member(redis_url, "r2") as two:
        one.compute(range(40))
        two.compute(range(40))
        await eventually(lambda: router.knows(one, two))
        client.delete(LOG)
        client.rpush(LOG, "not ours")
        two.compute(range(100, 140))
        await eventually(lambda: one.publisher.republished == 2 and router.knows(one, two))
        assert router.follower.view.step == "exact"
    assert "Redis is away" not in caplog.text


async def test_an_engine_restarted_under_its_old_name_is_a_new_epoch_with_new_contents(redis_url: str) -> None:
    async with following(redis_url) as router, Member(redis_url) as first:
        first.compute(range(40))
        await eventually(lambda: router.knows(first))
        await first.crash()
        async with Member(redis_url) as second:
            second.compute(range(100, 120))
            await eventually(lambda: router.knows(second))
            assert second.publisher.position.epoch > first.publisher.position.epoch
            assert router.index.held_prefixes(first.keys(range(40))) == {}
            assert router.index.held_prefixes(first.keys(range(100, 120))) == {"r1": 5}


async def test_a_replica_that_says_goodbye_leaves_placement_and_index_and_may_come_back(redis_url: str) -> None:
    async with following(redis_url) as router:
        async with Member(redis_url) as member:
            member.compute(range(40))
            await eventually(lambda: router.knows(member))
        await eventually(lambda: router.states() == {}, timeout_seconds=2.5)
        await eventually(lambda: len(router.index) == 0)
        async with Member(redis_url) as again:
            again.compute(range(20))
            await eventually(lambda: router.knows(again))
            assert router.states() == {"r1": "accepting"}


async def test_a_replica_whose_lease_is_gone_leaves_at_once(redis_url: str, client: Any) -> None:
    async with following(redis_url) as router, Member(redis_url, "r1") as dead, Member(redis_url, "r2") as alive:
        dead.compute(range(40))
        await eventually(lambda: router.knows(dead, alive))
        await dead.crash()
        client.pexpire("warmroute:{default}:replica:r1", 1)  # not to wait for five seconds
        await eventually(lambda: router.states() == {"r2": "accepting"}, timeout_seconds=2.5)
        assert router.index.held_prefixes(dead.keys(range(40))) == {}


async def test_a_draining_replica_is_known_as_such_within_a_second_or_two(redis_url: str) -> None:
    async with following(redis_url) as router, Member(redis_url) as member:
        await eventually(lambda: router.knows(member))
        member.record = make_record(state="draining")
        member.publisher.announce_soon()
        await eventually(lambda: router.states() == {"r1": "draining"}, timeout_seconds=2.5)


async def test_names_that_nobody_has_had_for_a_minute_are_taken_off_the_list(redis_url: str, client: Any) -> None:
    client.sadd("warmroute:{default}:replicas", "crashed-long-ago")
    hurried = lambda: time.monotonic() * 200  # noqa: E731 - a minute in 0.3 s
    async with Member(redis_url) as member:
        await eventually(lambda: member.publisher.current)
        async with following(redis_url, clock=hurried) as router:
            await eventually(lambda: client.smembers("warmroute:{default}:replicas") == {b"r1"})
            assert router.states() == {"r1": "accepting"}


@pytest.mark.parametrize(
    ("change", "words"),
    [({"golden_key": "00"}, "golden key"), ({"golden_prompt_key": "00"}, "golden prompt key")],
)
async def test_a_replica_whose_keys_are_not_ours_is_routed_with_its_cache_unknown_and_named_loudly(
    redis_url: str, caplog: pytest.LogCaptureFixture, change: dict[str, str], words: str
) -> None:
    async with following(redis_url) as router, Member(redis_url, **change) as member:
        member.compute(range(40))
        await eventually(lambda: router.states() == {"r1": "incompatible"})
        replica = router.fleet.get("r1")
        assert replica is not None
        assert replica.accepting
        assert not replica.publishes
        assert words in (replica.incompatibility or "")
        assert router.index.held_prefixes(member.keys(range(40))) == {}
        assert len([text for text in caplog.messages if "INCOMPATIBLE" in text]) == 1
        member.record = make_record()  # a corrected process under the same name
        await eventually(lambda: router.states() == {"r1": "accepting"})
        await eventually(lambda: router.knows(member))


async def test_a_router_with_another_secret_sees_no_replica_and_one_with_the_same_secret_does(redis_url: str) -> None:
    async with (
        Member(redis_url, secret="right") as member,
        following(redis_url, secret="right") as insider,
        following(redis_url, secret="wrong") as outsider,
    ):
        member.compute(range(40))
        await eventually(lambda: insider.knows(member))
        await eventually(lambda: outsider.follower._fleet_state.rejected_records["r1"])
        assert outsider.states() == {}


async def test_the_tokenizer_that_a_replica_names_is_fetched_and_encodes_prompts(redis_url: str) -> None:
    async with following(redis_url) as router, Member(redis_url):
        await eventually(lambda: any(namespace.encoder for namespace in router.fleet.namespaces("tiny")))
        (namespace,) = router.fleet.namespaces("tiny")
        assert (namespace.fingerprint, namespace.block_size) == (make_record().fingerprint, BLOCK_SIZE)


async def test_a_tokenizer_that_is_not_what_its_digest_says_is_refused(
    redis_url: str, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with Member(redis_url) as member:
        await eventually(lambda: member.publisher.current)
        client.set(f"warmroute:{{default}}:tokenizer:{member.record.tokenizer}", b"wrt1garbage")
        async with following(redis_url) as router:
            await eventually(lambda: any("cannot be used" in text for text in caplog.messages))
            await eventually(lambda: router.knows(member))
            assert all(namespace.encoder is None for namespace in router.fleet.namespaces("tiny"))


async def test_a_giant_reset_is_applied_without_losing_anything(redis_url: str) -> None:
    async with following(redis_url) as router, Member(redis_url) as member:
        member.compute(range(20_000 * BLOCK_SIZE))
        await eventually(lambda: router.knows(member))
        member.change(removed=set(member.held))
        await eventually(lambda: router.knows(member))
        await eventually(lambda: len(router.index) == 0)


@pytest.mark.parametrize("seed", range(3))
async def test_after_any_history_the_index_answers_as_brute_force_over_the_engines_does(
    redis_url: str, client: Any, seed: int
) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(3) for _ in range(BLOCK_SIZE * rng.randrange(1, 12))] for _ in range(60)]
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(following(redis_url))
        members = [await stack.enter_async_context(Member(redis_url, f"r{n}")) for n in range(4)]
        for _ in range(150):
            member = rng.choice(members)
            action = rng.random()
            if action < 0.6:
                member.compute(rng.choice(prompts))
            elif action < 0.9:  # evict what starts with some block: children go with their parent
                prompt = rng.choice(prompts)
                keep = rng.randrange(len(prompt) // BLOCK_SIZE)
                stem = prompt[: (keep + 1) * BLOCK_SIZE]
                gone = {k for p in prompts if p[: len(stem)] == stem for k in member.chain(p)[keep:]} & member.held
                member.change(removed=gone)
            elif action < 0.93:
                client.delete(f"warmroute:{{default}}:{rng.choice(['log', 'blocks'])}:{member.id}")
            elif action < 0.95:
                router.follower._positions.pop(member.id, None)
            else:
                await asyncio.sleep(0.02)
        await eventually(lambda: router.knows(*members))
        for prompt in prompts:
            chain = members[0].chain(prompt)
            expected = {}
            for member in members:
                depth = next((i for i, key in enumerate(chain) if key not in member.held), len(chain))
                if depth:
                    expected[member.id] = depth
            assert router.index.held_prefixes([published_key(key) for key in chain]) == expected


def test_a_delta_carries_the_position_it_leads_to() -> None:
    assert Delta(3, 4).position == LogPosition(3, 4) > LogPosition(2, 9)
