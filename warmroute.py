"""The command line: one subcommand per job, each a thin call into a package that is imported only then."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import NamedTuple

from shared.settings import (
    BenchRouterSettings,
    BenchSettings,
    CompareSettings,
    DoctorSettings,
    ReplicaSettings,
    RouterSettings,
    RouteSettings,
    SettingsError,
    SimulateSettings,
    TopSettings,
    UpSettings,
    misspelt_variables,
    parse,
)
from shared.supervisor import SUPERVISED, die_with_parent

__all__ = ["main"]

_BAD_USAGE = 2
_CANNOT_START = 1

Arguments = Sequence[str]


class _Command(NamedTuple):
    run: Callable[[Arguments], int]
    help: str


def _up(argv: Arguments) -> int:
    settings = parse(UpSettings, argv, os.environ, "warmroute up")
    _require_engine(settings.engine, settings.model)
    from shared.local_cluster import run

    return run(settings)


def _router(argv: Arguments) -> int:
    settings = parse(RouterSettings, argv, os.environ, "warmroute router")
    from router.program import run

    return run(settings)


def _replica(argv: Arguments) -> int:
    settings = parse(ReplicaSettings, argv, os.environ, "warmroute replica")
    _require_engine(settings.engine, settings.model)
    from replica.server import run

    return run(settings)


def _compare(argv: Arguments) -> int:
    settings = parse(CompareSettings, argv, os.environ, "warmroute compare")
    _require_engine(settings.engine, settings.model)
    from loadtest.compare import run

    return run(settings)


def _bench(argv: Arguments) -> int:
    if argv[:1] == ["router"]:
        return _bench_router(argv[1:])
    settings = parse(BenchSettings, argv, os.environ, "warmroute bench")
    if settings.name in ("tiers", "prefill", "engine"):
        _require_engine("torch" if settings.name == "engine" else settings.engine, settings.model)
    from loadtest.benches.run import run

    return run(settings)


def _bench_router(argv: Arguments) -> int:
    settings = parse(BenchRouterSettings, argv, os.environ, "warmroute bench router")
    from loadtest.bench_router import run

    return run(settings)


def _simulate(argv: Arguments) -> int:
    settings = parse(SimulateSettings, argv, os.environ, "warmroute simulate")
    from loadtest.simulator.command import run

    return run(settings)


def _route(argv: Arguments) -> int:
    settings = parse(RouteSettings, argv, os.environ, "warmroute route")
    from router.console import show_route

    return show_route(settings)


def _top(argv: Arguments) -> int:
    settings = parse(TopSettings, argv, os.environ, "warmroute top")
    from router.console import show_replicas

    return show_replicas(settings)


def _doctor(argv: Arguments) -> int:
    settings = parse(DoctorSettings, argv, os.environ, "warmroute doctor")
    from shared.doctor import run

    return run(settings)


def _version(argv: Arguments) -> int:
    if argv:
        raise SettingsError("version takes no arguments")
    sys.stdout.write(f"warmroute {version('warmroute')}\n")
    return 0


_COMMANDS = {
    "up": _Command(_up, "start Redis, replicas and a router on this machine"),
    "router": _Command(_router, "send each request where the least work is left to do"),
    "replica": _Command(_replica, "serve one engine and its prefix cache"),
    "compare": _Command(_compare, "run one workload against several policies, and report"),
    "bench": _Command(_bench, "measure this machine: caches, tiers, books"),
    "simulate": _Command(_simulate, "play a trace against policies, ours and peers', in virtual time"),
    "route": _Command(_route, "ask a running router where it would send a prompt, and why"),
    "top": _Command(_top, "watch the replicas of a running router"),
    "doctor": _Command(_doctor, "say what is found on this machine, and what to do"),
    "version": _Command(_version, "print the version"),
}


def main(argv: Arguments | None = None) -> int:
    """The exit code: 0 done, 1 could not, 2 wrong usage (one line on stderr says what)."""
    if SUPERVISED not in os.environ:  # else its parent has said so
        _warn_of_misspelt_variables()
    die_with_parent()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        (sys.stdout if arguments else sys.stderr).write(_usage())
        return 0 if arguments else _BAD_USAGE
    name, *rest = arguments
    if name == "--version":
        name = "version"
    command = _COMMANDS.get(name)
    if command is None:
        close = difflib.get_close_matches(name, _COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(_COMMANDS)}"
        sys.stderr.write(f"warmroute: no command is called {name!r}; {hint}\n")
        return _BAD_USAGE
    try:
        return command.run(rest)
    except SettingsError as error:
        sys.stderr.write(f"warmroute {name}: {error}\n")
        return _BAD_USAGE
    except _MissingPartError as error:
        sys.stderr.write(f"warmroute {name}: {error}\n")
        return _CANNOT_START


def _warn_of_misspelt_variables() -> None:
    if misspelt := misspelt_variables(os.environ):
        sys.stderr.write(f"warmroute: no command reads the variable {', '.join(misspelt)}\n")


class _MissingPartError(Exception):
    """An optional dependency is not installed. The message says how to get it."""


def _require_engine(engine: str, model: str) -> None:
    if engine == "sim" and model != "tiny":
        raise SettingsError(f"--engine sim plays the model tiny only, not {model!r}: leave --model out")
    # Looked for, not imported: torch takes seconds, and whoever needs it will import it.
    if engine == "torch" and not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        raise _MissingPartError("--engine torch needs PyTorch: pip install 'warmroute[engine]' (or use --engine sim)")


def _usage() -> str:
    lines = ["usage: warmroute COMMAND [--help | FLAGS]", ""]
    lines += [f"  {name:<9} {command.help}" for name, command in _COMMANDS.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
