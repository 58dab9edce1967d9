"""Where settings come from: flags, environment and a TOML file, all derived from one dataclass per program.

    --max-in-flight 64   over   WARMROUTE_MAX_IN_FLIGHT=64   over   max_in_flight = 64 in --config FILE   over   default

An empty variable counts as unset. Values are checked, whatever their source, and a SettingsError names the source of
the one at fault in one line.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

__all__ = ["Rules", "SettingsError", "parse", "setting", "unknown_variables"]

_PREFIX = "WARMROUTE_"
_CONFIG = "config"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_NONE = "none"
_KUBERNETES = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT|_PORT_\d+_")
"""Where a service is called warmroute-something, its pods' neighbours get such variables."""

T = TypeVar("T")


class SettingsError(ValueError):
    """One line for the user, which says what to change."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a field's metadata says beyond its type and default."""

    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    """Further variables, tried after WARMROUTE_<FIELD>."""
    secret: bool = False
    """No flag, since a process list shows flags; and never in a repr."""
    positional: bool = False
    metavar: str = ""


def setting(
    default: Any = dataclasses.MISSING,
    help: str = "",  # noqa: A002
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Iterable[str] = (),
    environment: tuple[str, ...] = (),
    secret: bool = False,
    positional: bool = False,
    metavar: str = "",
    shown: bool = True,
) -> Any:
    """A field of a settings dataclass. `shown=False` keeps it out of the repr, as `secret` does: a URL may hold one."""
    rules = Rules(help, low, high, tuple(choices), environment, secret, positional, metavar)
    return dataclasses.field(default=default, repr=shown and not secret, metadata={"rules": rules})


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    type: Any
    default: Any
    rules: Rules

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variables(self) -> tuple[str, ...]:
        return (_PREFIX + self.name.upper(), *self.rules.environment)

    @property
    def kind(self) -> type:
        """The type without `| None`."""
        if isinstance(self.type, types.UnionType):
            return next(kind for kind in typing.get_args(self.type) if kind is not types.NoneType)
        return typing.get_origin(self.type) or self.type

    @property
    def optional(self) -> bool:
        return isinstance(self.type, types.UnionType)


def parse(settings_class: type[T], argv: Sequence[str], environment: Mapping[str, str], program: str) -> T:
    """The settings of `program` (as in "warmroute router"). Raises SettingsError; `--help` prints and exits 0."""
    fields = _fields(settings_class)
    flags = vars(_parser(settings_class, fields, program).parse_args(list(argv)))
    values: dict[str, Any] = {}
    config = flags.pop(_CONFIG, None) or environment.get(_PREFIX + _CONFIG.upper())
    if config:
        values |= _from_toml(Path(config), fields)
    for field in fields.values():
        for variable in field.variables:
            if text := environment.get(variable):
                values[field.name] = _from_text(field, text, variable)
                break
    for name, given in flags.items():
        field = fields[name]
        values[name] = _from_text(field, given, field.name if field.rules.positional else field.flag)
    for field in fields.values():
        if field.name not in values and field.default is dataclasses.MISSING:
            raise SettingsError(f"{field.name} is missing; see {program} --help")
    return settings_class(**values)


def unknown_variables(environment: Iterable[str], programs: Iterable[type], others: Iterable[str] = ()) -> list[str]:
    """Names that look like settings and are none of any program's; each with what may have been meant."""
    known = {_PREFIX + _CONFIG.upper(), *others}
    for program in programs:
        known.update(variable for field in _fields(program).values() for variable in field.variables)
    # All begin alike, which says nothing about how near two of them are.
    ends = [name.removeprefix(_PREFIX) for name in known if name.startswith(_PREFIX)]
    unknown = []
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in known and not _KUBERNETES.search(name):
            close = difflib.get_close_matches(name.removeprefix(_PREFIX), ends, n=1)
            unknown.append(f"{name} (did you mean {_PREFIX}{close[0]}?)" if close else name)
    return unknown


def _fields(settings_class: type) -> dict[str, _Field]:
    hints = typing.get_type_hints(settings_class)
    return {
        field.name: _Field(field.name, hints[field.name], field.default, field.metadata["rules"])
        for field in dataclasses.fields(settings_class)
    }


def _from_toml(path: Path, fields: Mapping[str, _Field]) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read --config {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from error
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in fields:
            raise SettingsError(f"{path}: unknown key {key!r}{_suggestion(name, fields)}")
        values[name] = _from_toml_value(fields[name], value, f"{path}: {key}")
    return values


def _from_toml_value(field: _Field, value: Any, source: str) -> Any:
    if isinstance(value, str):
        return _from_text(field, value, source)
    if isinstance(value, list) and field.kind is tuple and all(isinstance(item, str) for item in value):
        return _checked(field, tuple(value), source)
    # TOML keeps whole numbers and booleans apart, and so do we: bool is an int only to Python.
    if type(value) is field.kind or (type(value) is int and field.kind is float):
        return _checked(field, field.kind(value), source)
    raise SettingsError(f"{source} must be {_description(field)}, not {value!r}")


def _from_text(field: _Field, given: str | list[str] | bool, source: str) -> Any:
    if isinstance(given, bool):
        return given
    if field.kind is tuple:
        texts = [given] if isinstance(given, str) else given
        return _checked(
            field, tuple(item.strip() for text in texts for item in text.split(",") if item.strip()), source
        )
    assert isinstance(given, str)
    text = given.strip()
    if field.optional and text.lower() == _NONE:
        return None
    try:
        return _checked(field, _CONVERTERS[field.kind](text), source)
    except (ValueError, KeyError) as error:
        if isinstance(error, SettingsError):
            raise
        raise SettingsError(f"{source} must be {_description(field)}, not {_shown(field, text)}") from None


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(text)


_CONVERTERS: dict[type, Callable[[str], Any]] = {str: str, int: int, float: float, bool: _boolean}


def _checked(field: _Field, value: Any, source: str) -> Any:
    rules = field.rules
    if rules.choices:
        for item in value if isinstance(value, tuple) else (value,):
            if item not in rules.choices:
                hint = _suggestion(str(item), rules.choices) or f"; choose from {', '.join(rules.choices)}"
                raise SettingsError(f"{source} must be {_description(field)}, not {item!r}{hint}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = rules.low, rules.high
        too_low = low is not None and value < low
        if too_low or (high is not None and value > high) or not math.isfinite(value):
            raise SettingsError(f"{source} must be {_description(field)}, not {value}")
    return value


def _description(field: _Field) -> str:
    rules = field.rules
    if rules.choices:
        return "a known name"
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a string",
        tuple: "a list of strings",
    }
    text = names[field.kind]
    if rules.low is not None and rules.high is not None:
        return f"{text} from {rules.low} to {rules.high}"
    if rules.low is not None:
        return f"{text} of at least {rules.low}"
    return text


def _shown(field: _Field, text: str) -> str:
    return "what it is" if field.rules.secret else repr(text)


def _suggestion(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


class _Parser(argparse.ArgumentParser):
    """Argparse, with one-line errors that suggest what may have been meant."""

    def parse_args(self, argv: list[str]) -> argparse.Namespace:  # type: ignore[override]
        namespace, unknown = self.parse_known_args(argv)
        if unknown:
            first = unknown[0].split("=")[0]
            what = "flag" if first.startswith("-") else "argument"
            raise SettingsError(f"unknown {what} {first}{_suggestion(first, self._option_string_actions)}")
        return namespace

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _parser(settings_class: type, fields: Mapping[str, _Field], program: str) -> _Parser:
    secrets = [f"{field.variables[0]} ({field.rules.help})" for field in fields.values() if field.rules.secret]
    epilog = "Each setting may also come from the environment (WARMROUTE_<SETTING>) or the TOML file."
    if secrets:
        epilog += f" Never as flags: {', '.join(secrets)}."
    parser = _Parser(
        prog=program,
        description=settings_class.__doc__,
        epilog=epilog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=112),
    )
    for field in fields.values():
        if not field.rules.secret:
            _add_argument(parser, field)
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these settings")
    return parser


def _add_argument(parser: _Parser, field: _Field) -> None:
    text = _help(field).replace("%", "%%")
    if field.rules.positional:
        count = None if field.default is dataclasses.MISSING else "?"
        parser.add_argument(field.name, help=text, nargs=count)
    elif field.kind is bool:
        parser.add_argument(field.flag, action=argparse.BooleanOptionalAction, help=text)
    else:
        metavar = field.rules.metavar or _METAVARS[field.kind]
        action = "append" if field.kind is tuple else "store"
        parser.add_argument(field.flag, metavar=metavar, action=action, help=text)


_METAVARS = {int: "N", float: "X", str: "NAME", tuple: "A,B"}


def _help(field: _Field) -> str:
    notes = []
    if field.rules.choices:
        notes.append(f"one of {', '.join(field.rules.choices)}")
    if field.default not in (dataclasses.MISSING, None, "", ()):
        shown = ",".join(field.default) if isinstance(field.default, tuple) else field.default
        notes.append(f"default {shown}")
    return field.rules.help + (f" ({'; '.join(notes)})" if notes else "")
