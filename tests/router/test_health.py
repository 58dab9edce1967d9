"""The breaker, under a clock of the test's own."""

from __future__ import annotations

from router.health import Health


def broken(failures: int = 3) -> Health:
    health = Health()
    for _ in range(failures):
        health.begin("a")
        health.failed("a", 0.0)
    return health


def test_it_opens_after_failures_in_a_row_and_for_that_replica_alone() -> None:
    assert broken(2).usable("a", 0.0)
    health = broken(3)
    assert not health.usable("a", 0.5)
    assert health.usable("b", 0.5)
    assert health.state("a", 0.5) == "open"


def test_a_success_starts_the_count_again() -> None:
    health = broken(2)
    health.succeeded("a")
    health.failed("a", 0.0)
    health.failed("a", 0.0)
    assert health.usable("a", 0.0)


def test_one_trial_at_a_time_decides() -> None:
    health = broken()
    assert health.usable("a", 1.5)
    assert health.state("a", 1.5) == "half-open"
    health.begin("a")
    assert not health.usable("a", 1.5), "one trial is enough"
    health.succeeded("a")
    assert health.state("a", 1.5) == "closed"


def test_a_failed_trial_doubles_the_pause_up_to_a_bound() -> None:
    health, now = broken(), 1.0
    for pause in (2, 4, 8, 16, 30, 30):
        health.begin("a")
        health.failed("a", now)
        assert not health.usable("a", now + pause - 0.1)
        now += pause
        assert health.usable("a", now)


def test_a_trial_whose_client_left_is_made_again() -> None:
    health = broken()
    health.begin("a")
    health.abandoned("a")
    assert health.usable("a", 1.5)


def test_a_trial_that_answers_and_then_breaks_opens_it_again() -> None:
    health = broken()
    health.begin("a")
    health.answering("a")
    assert health.usable("a", 1.5)
    health.failed("a", 1.5)
    assert not health.usable("a", 1.6)


def test_late_failures_of_requests_sent_before_it_opened_do_not_prolong_the_pause() -> None:
    health = broken()
    health.failed("a", 0.9)
    assert health.usable("a", 1.0)


def test_a_replica_that_left_is_forgotten() -> None:
    health = broken()
    health.set_reachable("a", False)
    health.retain([])
    assert health.usable("a", 0.0)
    assert health.reachable("a")
