"""Flags over variables over TOML over defaults; whatever is wrong is named in one line."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from router.policies import POLICIES
from shared import settings as programs
from shared.settings import (
    POLICY_NAMES,
    CompareSettings,
    ReplicaSettings,
    RouterSettings,
    RouteSettings,
    SettingsError,
    UpSettings,
    parse,
)

_PROGRAMS = [getattr(programs, name) for name in programs.__all__ if name.endswith("Settings")]


def _router(*argv: str, **environment: str) -> RouterSettings:
    return parse(RouterSettings, argv, environment, "warmroute router")


def _error(*argv: str, **environment: str) -> str:
    with pytest.raises(SettingsError) as refused:
        _router(*argv, **environment)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_flag_beats_a_variable_beats_toml_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text('port = 1\ncluster = "from-file"\nmax-in-flight = 7\nreplica = ["http://a:1", "http://b:2"]\n')
    settings = _router("--config", str(file), "--port", "3", WARMROUTE_PORT="2", WARMROUTE_CLUSTER="from-variable")
    assert (settings.port, settings.cluster, settings.max_in_flight) == (3, "from-variable", 7)
    assert settings.replica == ("http://a:1", "http://b:2")
    assert settings.grace_seconds == RouterSettings().grace_seconds
    assert _router(WARMROUTE_CONFIG=str(file)).port == 1


def test_an_empty_variable_counts_as_unset() -> None:
    assert _router(WARMROUTE_PORT="", WARMROUTE_SECRET="") == RouterSettings()


def test_redis_comes_from_redis_url_too_and_none_means_none() -> None:
    assert _router(REDIS_URL="redis://a").redis == "redis://a"
    assert _router(REDIS_URL="redis://a", WARMROUTE_REDIS="redis://b").redis == "redis://b"
    assert _router("--redis", "none", REDIS_URL="redis://a").redis is None
    assert _router().redis is None


def test_lists_are_given_with_commas_or_by_repeating_the_flag() -> None:
    expected = ("http://a:1", "http://b:2", "http://c:3")
    assert _router("--replica", "http://a:1,http://b:2", "--replica", "http://c:3").replica == expected
    assert _router(WARMROUTE_REPLICA="http://a:1, http://b:2,http://c:3").replica == expected


def test_secrets_have_no_flag_and_are_never_shown() -> None:
    settings = _router(WARMROUTE_SECRET="hunter2", WARMROUTE_ADMIN_KEY="hunter3", REDIS_URL="redis://:hunter4@host")
    assert (settings.secret, settings.admin_key) == ("hunter2", "hunter3")
    assert "hunter" not in repr(settings)
    assert "hunter" not in _error("--secret", "hunter2")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prot", "1"], r"unknown flag --prot; did you mean --port\?"),
        (["--port=x"], r"--port must be a whole number from 0 to 65535, not 'x'"),
        (["--port", "65536"], r"--port must be .* not 65536"),
        (["--port"], "--port"),
        (["--por", "1"], "unknown flag --por; did you mean --port"),
        (["--grace-seconds", "nan"], "--grace-seconds must be a number"),
        (["--policy", "round-robbin"], r"did you mean round-robin\?"),
        (["--policy", "zzz"], "choose from cache-aware, round-robin"),
        (["--replica", "example.com"], "--replica must be a URL like http://host:port"),
        (["--replica", "http://host:99999"], "--replica must be a URL"),
        (["--redis", "http://host"], "--redis must be a URL like redis://host:port"),
        (["--workers", "0"], "--workers must be a whole number from 1 to 256, not 0"),
        (["--cluster", "a b"], "--cluster must be 1 to 128 letters, digits"),
        (["extra"], "unknown argument extra"),
        (["--config", "/nowhere/x.toml"], "cannot read --config /nowhere/x.toml: No such file"),
    ],
)
def test_a_bad_flag_is_named_with_what_it_must_be(argv: list[str], message: str) -> None:
    assert re.search(message, _error(*argv))


@pytest.mark.parametrize("name", ["a b", "a/b", "a\nb", "{a}", "ü", "a" * 129])
def test_a_replica_that_routers_could_not_name_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=r"--id must be 1 to 128 letters, digits"):
        parse(ReplicaSettings, ["--id", name], {}, "warmroute replica")


def test_a_bad_variable_is_named_by_its_own_name() -> None:
    assert _error(WARMROUTE_PORT="tcp://10.0.0.1:80").startswith("WARMROUTE_PORT must be a whole number")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot = 1", r"unknown key 'prot'; did you mean port\?"),
        ("zzz = 1", r"unknown key 'zzz'$"),
        ("[router]\nport = 1", "unknown key 'router'"),
        ("port = true", "port must be a whole number from 0 to 65535, not True"),
        ("port = 1.5", "port must be a whole number"),
        ("port = -1", "port must be a whole number"),
        ("replica = [1]", "replica must be a list of strings"),
        ("port = ", "not valid TOML"),
    ],
)
def test_a_bad_file_is_named_with_the_key_at_fault(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "router.toml"
    file.write_text(content)
    error = _error("--config", str(file))
    assert error.startswith(str(file))
    assert re.search(message, error)


def test_a_whole_number_in_toml_is_a_number_of_seconds_too(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text("grace_seconds = 5")
    assert _router("--config", str(file)).grace_seconds == 5.0


def test_the_choices_for_a_list_are_checked_one_by_one() -> None:
    assert parse(CompareSettings, ["--policies", "random,session"], {}, "x").policies == ("random", "session")
    with pytest.raises(SettingsError, match="did you mean random"):
        parse(CompareSettings, ["--policies", "cache-aware,randem"], {}, "x")


def test_a_missing_argument_is_asked_for() -> None:
    with pytest.raises(SettingsError, match="prompt"):
        parse(RouteSettings, [], {}, "warmroute route")
    assert parse(RouteSettings, ["hello there"], {}, "warmroute route").prompt == "hello there"


@pytest.mark.parametrize("program", _PROGRAMS)
def test_help_names_every_setting_and_ends_well(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(program, ["--help"], {}, "warmroute x")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(program):
        rules = field.metadata["rules"]
        assert rules.help, field.name
        name = f"WARMROUTE_{field.name.upper()}" if rules.secret else field.name if rules.positional else None
        assert (name or "--" + field.name.replace("_", "-")) in shown


@pytest.mark.parametrize("program", _PROGRAMS)
def test_every_default_passes_its_own_rules(program: Any) -> None:
    values = {"prompt": "x"} if program is RouteSettings else {}
    made = program(**values)
    for field in dataclasses.fields(program):
        value, rules = getattr(made, field.name), field.metadata["rules"]
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert rules.low is not None, f"{field.name} has no lower bound"
            assert rules.high is not None, f"{field.name} has no upper bound"
            assert rules.low <= value <= rules.high


def test_the_policies_offered_are_the_ones_there_are() -> None:
    assert set(POLICY_NAMES) == set(POLICIES)


def test_what_two_programs_share_has_one_default() -> None:
    for name in ("engine", "model", "block_size", "token_budget", "cluster"):
        assert getattr(UpSettings(), name) == getattr(ReplicaSettings(), name)
