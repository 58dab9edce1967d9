"""A tenant is proven by the secret, for that tenant, for some minutes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.tenant_proof import TenantProofs

NOW = 1_900_000_000.0


def proofs(secret: str = "secret", now: float = NOW) -> TenantProofs:
    return TenantProofs(secret, lambda: now)


@given(tenant=st.text(min_size=1), skew=st.floats(-530, 530))
def test_a_proof_holds_on_machines_whose_clocks_differ_a_little(tenant: str, skew: float) -> None:
    assert proofs(now=NOW + skew).valid(tenant, proofs().of(tenant))


@given(st.floats(661, 1e9), st.sampled_from([-1, 1]))
def test_it_does_not_hold_for_ever_nor_before_its_time(seconds: float, direction: int) -> None:
    assert not proofs(now=NOW + direction * seconds).valid("acme", proofs().of("acme"))


@given(tenant=st.text(min_size=1), other=st.text())
def test_it_is_of_one_tenant_and_one_secret(tenant: str, other: str) -> None:
    proof = proofs().of(tenant)
    assert proofs().valid(other, proof) == (other == tenant)
    assert not proofs("another").valid(tenant, proof)


@given(st.text())
def test_whatever_else_is_no_proof(text: str) -> None:
    assert not proofs().valid("acme", text)


def test_neither_its_time_nor_its_seal_can_be_changed() -> None:
    proof = proofs().of("acme")
    seconds, seal = proof.split(".")
    assert not proofs().valid("acme", f"{int(seconds) + 60}.{seal}")
    assert not proofs().valid("acme", f"{seconds}.{'0' * 64}")
    assert not proofs().valid("acme", f"{seconds}.{seal.upper()}")
    assert not proofs().valid("acme", f"٣{seconds[1:]}.{seal}"), "digits are ASCII"


def test_it_is_the_same_within_a_minute() -> None:
    minute = NOW // 60 * 60
    assert len({proofs(now=minute + second).of("acme") for second in (0, 30, 59.9)}) == 1
    assert proofs(now=minute + 60).of("acme") != proofs(now=minute).of("acme")
