"""Which blocks of a prompt everybody may share, and what a tenant's own keys continue behind them."""

from __future__ import annotations

from collections.abc import Sequence

from shared.blocks import BlockKey, block_keys, namespace_root
from shared.public_prefixes import Branch, Namespace, PublicPrefixes

SIZE = 4
MANUAL = list(range(100, 118))  # four whole blocks, and half of one
EXAMPLES = [*MANUAL[:8], *range(200, 208)]
PUBLIC_ROOT = namespace_root("model", "", "secret")


def registered() -> PublicPrefixes:
    return PublicPrefixes("model", SIZE, "secret", [MANUAL, EXAMPLES, [1, 2]])


def keys(namespace: Namespace, tokens: Sequence[int]) -> list[BlockKey]:
    """All keys of a prompt, by the definition."""
    if namespace.branch is None:
        return block_keys(namespace.root, tokens, SIZE)
    shared = namespace.branch.blocks
    public = block_keys(namespace.root, tokens[: shared * SIZE], SIZE)
    return public + block_keys(namespace.branch.root, tokens[shared * SIZE :], SIZE)


def test_without_a_tenant_all_of_a_prompt_is_public() -> None:
    assert registered().namespace("", [*MANUAL, 1, 2, 3]) == Namespace(PUBLIC_ROOT)


def test_a_prompt_that_begins_otherwise_is_the_tenants_own_from_its_first_block() -> None:
    for prompt in ([7, *MANUAL], [1, 2, 3, 4, 5], [], MANUAL[:3]):
        assert registered().namespace("a", prompt) == Namespace(namespace_root("model", "a", "secret"))
    assert PublicPrefixes("model", SIZE, "secret").namespace("a", MANUAL).branch is None


def test_exactly_the_whole_blocks_of_the_registered_beginning_are_shared() -> None:
    for prompt, blocks in (
        ([*MANUAL, 1, 2, 3], 4),
        (MANUAL, 4),
        ([*MANUAL[:16], *range(50)], 4),
        ([*MANUAL[:15], 0, 0], 3),
        ([*EXAMPLES, 9], 4),
        ([*MANUAL[:8], 5, 5, 5, 5], 2),
    ):
        namespace = registered().namespace("a", prompt)
        assert namespace.root == PUBLIC_ROOT
        assert namespace.branch is not None
        assert namespace.branch.blocks == blocks


def test_behind_the_shared_blocks_two_tenants_have_no_key_in_common() -> None:
    prompt = [*MANUAL, *range(40)]
    everyone = [keys(registered().namespace(tenant, prompt), prompt) for tenant in ("a", "b", "")]
    for index, own in enumerate(everyone):
        assert own[:4] == block_keys(PUBLIC_ROOT, MANUAL, SIZE)
        assert len(own) == len(prompt) // SIZE
        for other in everyone[index + 1 :]:
            assert not set(own[4:]) & set(other[4:])


def test_a_tenants_keys_depend_on_the_secret_and_on_where_they_leave_the_public_blocks() -> None:
    branches = [
        PublicPrefixes("model", SIZE, secret, [MANUAL]).namespace("a", prompt).branch
        for secret in ("secret", "other")
        for prompt in (MANUAL, [*MANUAL[:8], 0])
    ]
    roots = {branch.root for branch in branches if isinstance(branch, Branch)}
    assert len(roots) == 4
