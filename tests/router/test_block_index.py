"""The index against brute force: whatever is stored, removed, replaced or swept, each replica's depth is right."""

from __future__ import annotations

import random
from itertools import takewhile

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.block_index import BlockIndex, HeldKeys, HeldTier
from shared.blocks import BlockKey, PublishedKey, block_keys, checksum, namespace_root, published_key

ROOT = namespace_root("model")
REPLICAS = [f"r{number}" for number in range(5)]


def chain(tokens: str | list[int], root: BlockKey = ROOT) -> list[PublishedKey]:
    """Keys of a prompt of one-token blocks."""
    return [published_key(key) for key in block_keys(root, [ord(t) if isinstance(t, str) else t for t in tokens], 1)]


def depth(held: set[PublishedKey], keys: list[PublishedKey]) -> int:
    return sum(1 for _ in takewhile(held.__contains__, keys))


def test_a_block_in_the_middle_that_differs_ends_the_match_even_if_later_blocks_look_alike() -> None:
    index = BlockIndex()
    index.apply("r0", chain("AXC"))
    assert index.held_prefixes(chain("ABC")) == {"r0": 1}
    assert index.held_prefixes(chain("AXC")) == {"r0": 3}
    assert index.held_prefixes(chain("XC")) == {}


def test_every_holder_is_found_at_its_own_depth() -> None:
    index = BlockIndex()
    prompt = chain("ABCDEFGH")
    for blocks, replica_id in enumerate(REPLICAS):
        index.apply(replica_id, prompt[:blocks])
    assert index.held_prefixes(prompt) == {"r1": 1, "r2": 2, "r3": 3, "r4": 4}
    assert index.held_prefixes([]) == {}


def test_one_replica_that_removes_a_block_leaves_it_to_the_others() -> None:
    index = BlockIndex()
    for replica_id in ("r0", "r1"):
        index.apply(replica_id, chain("ABC"))
    index.apply("r0", removed=chain("ABC")[1:])
    assert index.held_prefixes(chain("ABC")) == {"r0": 1, "r1": 3}


def test_a_change_that_comes_twice_counts_once() -> None:
    index = BlockIndex()
    once = index.apply("r0", chain("ABC"))
    assert index.apply("r0", chain("ABC")) == once == HeldKeys(HeldTier(3, checksum(chain("ABC"))))
    index.apply("r0", removed=chain("ABC"))
    assert index.apply("r0", removed=chain("ABC")) == HeldKeys()
    assert len(index) == 0


def test_a_removed_replica_is_gone_at_once_and_its_keys_after_the_sweep() -> None:
    index = BlockIndex()
    index.apply("r0", chain("ABC"))
    index.apply("r1", chain("A"))
    index.remove("r0")
    assert index.held_prefixes(chain("ABC")) == {"r1": 1}
    assert index.held("r0") == HeldKeys()
    while index.sweep():
        pass
    assert len(index) == 1
    index.check_integrity()


def test_a_slot_serves_another_replica_only_when_nothing_of_the_first_is_left() -> None:
    index = BlockIndex()
    index.apply("r0", chain("ABC"))
    index.remove("r0")
    index.apply("r1", chain("A"))
    assert index.held_prefixes(chain("ABC")) == {"r1": 1}
    while index.sweep():
        pass
    index.apply("r2", chain("AB"))
    assert index.held_prefixes(chain("ABC")) == {"r1": 1, "r2": 2}
    index.check_integrity()


def test_replicas_that_come_and_go_for_ever_do_not_widen_the_masks() -> None:
    index = BlockIndex()
    for generation in range(300):
        index.replace("r0", chain([generation]))
        while index.sweep():
            pass
    assert len(index) == 1
    assert max(index._device.values()) <= 0b11


def test_hundreds_of_replicas_are_told_apart() -> None:
    index = BlockIndex()
    prompt = chain(list(range(300)))
    for number in range(300):
        index.apply(f"r{number}", prompt[: number + 1])
    assert index.held_prefixes(prompt) == {f"r{number}": number + 1 for number in range(300)}
    index.check_integrity()


def test_queries_see_the_old_keys_until_a_replacement_is_complete() -> None:
    index = BlockIndex()
    old, new = chain("ABC"), chain(list(range(5000)))
    index.apply("r0", old)
    steps = index.replacing("r0", new)
    next(steps)
    assert index.held_prefixes(old) == {"r0": 3}
    assert index.held_prefixes(new) == {}
    index.check_integrity()
    for _ in steps:
        pass
    assert index.held_prefixes(old) == {}
    assert index.held_prefixes(new) == {"r0": 5000}
    index.check_integrity()


def test_a_replacement_given_up_half_way_leaves_the_old_keys() -> None:
    index = BlockIndex()
    index.apply("r0", chain("ABC"))
    steps = index.replacing("r0", chain(list(range(5000))))
    next(steps)
    steps.close()
    assert index.held_prefixes(chain("ABC")) == {"r0": 3}
    while index.sweep():
        pass
    assert len(index) == 3
    index.check_integrity()


def test_keys_stored_while_a_sweep_is_under_way_stay() -> None:
    index = BlockIndex()
    index.replace("r0", chain(list(range(30_000))))
    index.remove("r0")
    assert index.sweep()
    index.apply("r1", chain(list(range(30_000))))
    while index.sweep():
        pass
    assert index.held_prefixes(chain(list(range(30_000)))) == {"r1": 30_000}
    index.check_integrity()


def test_blocks_in_host_memory_extend_what_is_on_the_device() -> None:
    index = BlockIndex()
    prompt = chain("ABCDE")
    index.apply("r0", stored=prompt[:2], host_stored=prompt[2:4])
    index.apply("r1", host_stored=prompt[:1])
    assert index.held_prefixes(prompt) == {"r0": 2}
    assert index.resident_prefixes(prompt) == {"r0": 4, "r1": 1}
    index.remove("r0")
    assert index.resident_prefixes(prompt) == {"r1": 1}
    assert index.tiered
    index.apply("r1", host_removed=prompt[:1])
    while index.sweep():
        pass
    assert not index.tiered


@given(seed=st.integers(0, 2**32), replicas=st.integers(1, 130), blocks=st.integers(1, 70))
@settings(max_examples=60, deadline=None)
def test_any_mixture_of_depths_is_found_for_all_replicas_at_once(seed: int, replicas: int, blocks: int) -> None:
    rng = random.Random(seed)
    prompt = chain([rng.randrange(3) for _ in range(blocks)])
    index = BlockIndex()
    expected = {}
    for number in range(replicas):
        held = rng.choice([0, 1, blocks, rng.randint(0, blocks), rng.randint(0, blocks)])
        index.apply(f"r{number}", prompt[:held])
        if held:
            expected[f"r{number}"] = held
    assert index.held_prefixes(prompt) == expected


_prompts = st.lists(st.integers(0, 2), min_size=1, max_size=8)
_replicas = st.sampled_from(REPLICAS)


class IndexAgainstSets(RuleBasedStateMachine):
    """Each replica is a set of keys per tier; blocks move as an engine moves them: leaves first."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex()
        self.device: dict[str, set[tuple[int, ...]]] = {}
        self.host: dict[str, set[tuple[int, ...]]] = {}

    @staticmethod
    def keys(chains: set[tuple[int, ...]]) -> set[PublishedKey]:
        return {chain(list(tokens))[-1] for tokens in chains}

    @rule(replica_id=_replicas, prompt=_prompts)
    def compute_a_prompt(self, replica_id: str, prompt: list[int]) -> None:
        device = self.device.setdefault(replica_id, set())
        self.host.setdefault(replica_id, set())
        device.update(tuple(prompt[:end]) for end in range(1, len(prompt) + 1))
        self.index.apply(replica_id, chain(prompt))

    @rule(replica_id=_replicas, to_host=st.booleans(), pick=st.integers(0, 1000))
    def evict_a_leaf(self, replica_id: str, to_host: bool, pick: int) -> None:
        device = self.device.get(replica_id, set())
        leaves = sorted(
            block for block in device if not any(len(b) > len(block) and b[: len(block)] == block for b in device)
        )
        if leaves:
            leaf = leaves[pick % len(leaves)]
            device.remove(leaf)
            key = self.keys({leaf})
            self.index.apply(replica_id, removed=key, host_stored=key if to_host else ())
            if to_host:
                self.host[replica_id].add(leaf)
            else:  # what was below it in host memory cannot be hit any more
                below = {block for block in self.host[replica_id] if block[: len(leaf)] == leaf}
                self.host[replica_id] -= below
                self.index.apply(replica_id, host_removed=self.keys(below))

    @rule(replica_id=_replicas)
    def the_replica_leaves(self, replica_id: str) -> None:
        self.index.remove(replica_id)
        self.device.pop(replica_id, None)
        self.host.pop(replica_id, None)

    @rule(replica_id=_replicas, other=_replicas)
    def the_replica_is_read_again(self, replica_id: str, other: str) -> None:
        self.device[replica_id] = set(self.device.get(other, set()))
        self.host[replica_id] = set(self.host.get(other, set()))
        self.index.replace(replica_id, list(self.keys(self.device[replica_id])), list(self.keys(self.host[replica_id])))

    @rule()
    def clear_up(self) -> None:
        self.index.sweep()

    @rule(prompt=_prompts)
    def ask(self, prompt: list[int]) -> None:
        keys = chain(prompt)
        device = {replica_id: depth(self.keys(held), keys) for replica_id, held in self.device.items()}
        resident = {
            replica_id: depth(self.keys(held | self.host[replica_id]), keys) for replica_id, held in self.device.items()
        }
        assert self.index.held_prefixes(keys) == {name: blocks for name, blocks in device.items() if blocks}
        assert self.index.resident_prefixes(keys) == {name: blocks for name, blocks in resident.items() if blocks}

    @invariant()
    def the_books_balance(self) -> None:
        self.index.check_integrity()


TestIndexAgainstSets = IndexAgainstSets.TestCase
TestIndexAgainstSets.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
