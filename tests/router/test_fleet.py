"""The fleet's one list: who is in it, and what each replica may be used for."""

from __future__ import annotations

import msgspec

from replica.tiny_tokenizer import tiny_bundle
from router.fleet import Fleet, FleetReplica
from shared.prompts import PromptEncoder
from tests.fleet_members import make_record


def state(replica: FleetReplica) -> str:
    """Asked anew each time: a type checker would believe that it never changes."""
    return replica.state


def test_a_replica_is_one_object_from_its_first_record_to_its_end() -> None:
    fleet = Fleet()
    replica = fleet.update(make_record("r1"), 1.0)
    assert fleet.update(make_record("r1", version=9), 2.0) is replica
    assert (replica.last_seen_seconds, replica.state, replica.accepting) == (2.0, "accepting", True)
    fleet.leave("r1")
    assert (replica.state, replica.accepting, list(fleet)) == ("gone", False, [])
    assert fleet.update(make_record("r1"), 3.0) is not replica
    fleet.leave("unknown")


def test_listeners_hear_of_coming_going_and_successors_and_of_nothing_else() -> None:
    fleet = Fleet()
    heard: list[list[str]] = []
    fleet.subscribe(lambda: heard.append([replica.id for replica in fleet]))
    for version in range(3):
        fleet.update(make_record("r1", version=version), 1.0)
    fleet.add_static("http://127.0.0.1:9000/")
    fleet.drain("r1")
    for version in range(3):
        fleet.update(make_record("r1", version=version, started_at=2.0), 1.0)
    fleet.leave("r1")
    both = ["r1", "127.0.0.1:9000"]
    assert heard == [["r1"], both, both, ["127.0.0.1:9000"]]


def test_a_replica_drains_by_its_own_wish_or_the_operators() -> None:
    fleet = Fleet()
    replica = fleet.update(make_record("r1"), 1.0)
    assert fleet.drain("r1")
    assert (state(replica), replica.accepting) == ("draining", False)
    fleet.update(make_record("r1"), 2.0)
    assert state(replica) == "draining", "its next lease does not undo the operator's wish"
    assert fleet.drain("r1", asked=False)
    assert state(replica) == "accepting"
    fleet.update(make_record("r1", state="draining"), 3.0)
    assert state(replica) == "draining"
    assert not fleet.drain("unknown")


def test_the_operators_wish_outlives_a_lost_lease_but_not_the_process() -> None:
    fleet = Fleet()
    fleet.update(make_record("r1", started_at=1.0), 1.0)
    fleet.drain("r1")
    fleet.leave("r1")
    assert fleet.update(make_record("r1", started_at=1.0), 2.0).state == "draining"
    assert fleet.update(make_record("r1", started_at=5.0), 3.0).state == "accepting"
    fleet.drain("r1")
    fleet.leave("r1")
    assert fleet.update(make_record("r1", started_at=9.0), 4.0).state == "accepting"


def test_an_incompatible_replica_takes_work_but_its_cache_counts_for_nothing() -> None:
    fleet = Fleet()
    replica = fleet.update(make_record("r1"), 1.0)
    assert replica.publishes
    fleet.set_incompatibility("r1", "golden key differs")
    assert (replica.state, replica.accepting, replica.publishes) == ("incompatible", True, False)
    assert fleet.namespaces("tiny") == ()
    fleet.set_incompatibility("r1", None)
    assert replica.publishes
    assert len(fleet.namespaces("tiny")) == 1


def test_a_static_replica_serves_any_model_until_it_says_which() -> None:
    fleet = Fleet()
    static = fleet.add_static("http://10.0.0.1:8000")
    member = fleet.update(make_record("r1", model="tiny"), 1.0)
    assert fleet.serving("tiny") == (static, member)
    assert fleet.serving("whatever") == (static,)
    assert fleet.models == ["tiny"]
    assert (static.publishes, static.load, static.cost, static.replica_class) == (False, None, None, "")
    fleet.set_model("10.0.0.1:8000", "other")
    assert fleet.serving("tiny") == (member,)
    assert fleet.serving("other") == (static,)
    assert fleet.serving("whatever") == ()
    assert fleet.models == ["other", "tiny"]


def test_who_takes_new_work_is_known_after_every_change() -> None:
    fleet = Fleet()
    static = fleet.add_static("http://10.0.0.1:8000")
    member = fleet.update(make_record("r1", started_at=1.0), 1.0)

    def accepting() -> list[tuple[FleetReplica, ...]]:
        known = [fleet.accepting(), fleet.accepting("tiny")]
        assert known[0] == tuple(replica for replica in fleet if replica.accepting)
        assert known[1] == tuple(replica for replica in fleet.serving("tiny") if replica.accepting)
        return known

    assert accepting() == [(static, member)] * 2
    fleet.drain("r1")
    assert accepting() == [(static,)] * 2
    fleet.drain("r1", asked=False)
    fleet.set_incompatibility("r1", "golden key differs")
    assert accepting() == [(static, member)] * 2
    fleet.update(make_record("r1", started_at=1.0, state="draining"), 2.0)
    assert accepting() == [(static,)] * 2
    fleet.update(make_record("r1", started_at=1.0), 3.0)
    assert accepting() == [(static, member)] * 2
    fleet.adopt_drains({"r1": 1.0})
    assert accepting() == [(static,)] * 2
    fleet.update(make_record("r1", started_at=2.0), 4.0)  # another process under the same name
    assert accepting() == [(static, member)] * 2
    fleet.set_model("10.0.0.1:8000", "other")
    assert accepting() == [(static, member), (member,)]
    fleet.leave("r1")
    assert accepting() == [(static,), ()]


def test_names_that_clients_make_up_leave_no_trace() -> None:
    fleet = Fleet()
    fleet.add_static("http://10.0.0.1:8000")
    fleet.update(make_record("r1"), 1.0)
    for number in range(100):
        fleet.serving(f"model-{number}")
        fleet.accepting(f"model-{number}")
        fleet.namespaces(f"model-{number}")
    assert not fleet._serving
    assert not fleet._accepting
    assert not fleet._namespaces


def test_a_fleet_between_two_versions_of_a_model_has_two_namespaces_the_most_common_first() -> None:
    fleet = Fleet()
    for number in range(3):
        fleet.update(make_record(f"r{number}", fingerprint="new" if number else "old"), 1.0)
    assert [namespace.fingerprint for namespace in fleet.namespaces("tiny")] == ["new", "old"]
    fleet.update(make_record("r1", fingerprint="old"), 2.0)
    assert [namespace.fingerprint for namespace in fleet.namespaces("tiny")] == ["old", "new"]


def test_an_encoder_appears_in_the_namespaces_of_its_tokenizer_and_is_dropped_when_long_unused() -> None:
    fleet = Fleet()
    encoder = PromptEncoder(tiny_bundle())
    fleet.update(make_record("r1", tokenizer="digest"), 1.0)
    assert fleet.namespaces("tiny")[0].encoder is None
    fleet.set_encoder("digest", encoder)
    assert fleet.namespaces("tiny")[0].encoder is encoder
    fleet.leave("r1")
    assert fleet.encoder("digest") is encoder, "it may be back in a moment"
    for number in range(10):
        fleet.set_encoder(f"digest {number}", encoder)
        fleet.update(make_record("r2", tokenizer=f"digest {number}"), 2.0)
        fleet.leave("r2")
    assert len(fleet._encoders) <= 5
    assert fleet.encoder("digest") is None


def test_a_new_address_of_a_replica_is_taken_over() -> None:
    fleet = Fleet()
    replica = fleet.update(make_record("r1"), 1.0)
    fleet.update(msgspec.structs.replace(make_record("r1"), url="http://elsewhere:1/"), 2.0)
    assert replica.url == "http://elsewhere:1"
