"""What counts as goodput."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from loadtest.objective import Objective
from shared.settings import SettingsError
from tests.loadtest.test_results import record, run


def test_limits_are_read_and_what_is_left_out_is_not_limited() -> None:
    assert Objective.parse("ttft=1.5,tpot=0.05") == Objective(1.5, 0.05)
    assert Objective.parse("tpot=0.05") == Objective(math.inf, 0.05)
    assert str(Objective.parse("ttft=2")) == "first token within 2 s"


@pytest.mark.parametrize("told", ["", "ttft", "ttft=fast", "e2e=1", "ttft=0", "ttft=nan"])
def test_anything_else_is_refused(told: str) -> None:
    with pytest.raises(SettingsError, match="--objective"):
        Objective.parse(told)


def test_a_request_is_good_within_both_limits_and_never_when_it_failed() -> None:
    objective = Objective(ttft_seconds=1.0, tpot_seconds=0.1)
    good = replace(record(1000.0), tpot_ms=100.0)
    assert objective.met_by(good)
    assert objective.met_by(replace(good, tpot_ms=None)), "one token has no time between tokens"
    assert not objective.met_by(replace(good, ttft_ms=1000.1))
    assert not objective.met_by(replace(good, tpot_ms=100.1))
    assert not objective.met_by(replace(good, error="broken off"))


def test_goodput_is_a_share_of_all_requests_failed_ones_included() -> None:
    assert run(record(10.0), record(900.0), record(1100.0), record(None)).result.goodput == 0.5
