"""Jinja for templates of strangers: immutable sandbox, and an end to every rendering.

A chat template comes with a model and runs on the router's event loop. Here each loop iteration, call and filter is
a step, each string that is built counts its characters, and one rendering has a budget of both, and of CPU seconds; a
single operation that would size a text by a huge number or by the product of two long texts is refused beforehand. A
template that runs away ends with RunawayTemplateError.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["RunawayTemplateError", "TemplateSandbox"]

_MAX_STEPS = 1_000_000
_MAX_SECONDS = 1.0
"""Of this thread's CPU time, so that a busy machine refuses nothing. Looked at every `_STEPS_PER_LOOK` steps."""
_STEPS_PER_LOOK = 64
_MAX_CHARACTERS = 256 * 2**20
_MAX_PRODUCT = 2**30
_MAX_EXPONENT = 64
_WIDE_FORMAT = re.compile(r"\d{6}")
"""A format string that asks for a field of 100,000 columns or more."""

_ASK_TO_GROW = frozenset({"cycler", "joiner", "lipsum"})
"""Globals of Jinja that make things without end and that no chat template needs."""


class RunawayTemplateError(Exception):
    """The template spent its budget."""


@dataclass(slots=True)
class _Budget:
    now: datetime
    end_seconds: float | None = None
    """Set at the first look: most renderings end before, and asking for CPU time is not free."""
    steps: int = _MAX_STEPS
    characters: int = _MAX_CHARACTERS
    look_at_steps: int = _MAX_STEPS - _STEPS_PER_LOOK


_budget: ContextVar[_Budget] = ContextVar("budget")


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's tokens for training; for a prompt it is its body and nothing else."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment that `transformers` gives to chat templates, metered."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters = {name: _metered(function) for name, function in self.filters.items()}
        self.filters["tojson"] = _metered(_to_json)
        self.filters |= {"metered": _spend_for, "metered_items": _metered_items}
        self.globals = {name: value for name, value in self.globals.items() if name not in _ASK_TO_GROW}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def run(self, template: jinja2.Template, variables: Mapping[str, Any], now: datetime) -> str:
        """Render with a fresh budget. Raises RunawayTemplateError, or whatever the template raises."""
        token = _budget.set(_Budget(now))
        try:
            pieces = []
            for piece in template.root_render_func(template.new_context(dict(variables))):
                _spend(1, len(piece))
                pieces.append(piece)
            return "".join(pieces)
        finally:
            _budget.reset(token)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if isinstance(__obj, LoopContext):
            args = tuple(_metered_items(items) for items in args)
        elif __obj is not __self.globals["range"]:
            _refuse_huge(getattr(__obj, "__self__", None), *args, *kwargs.values())
        return _spend_for(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= _MAX_EXPONENT and abs(right) <= _MAX_EXPONENT):
            raise RunawayTemplateError("a power of absurd size")
        if operator == "*":
            _refuse_huge(left, right)
        if operator == "%" and isinstance(left, str):
            _refuse_wide(left, right)
        return _spend_for(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _refuse_wide(value.__self__)
        return wrapped

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        for loop in list(source.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "metered_items", [], [], None, None)
        for block in list(source.find_all(nodes.AssignBlock)):
            block.filter = nodes.Filter(block.filter, "metered", [], [], None, None)
        for parent in list(source.find_all(nodes.Node)):
            _meter_concatenations(parent)
        return super()._generate(source, name, filename, defer_init)


def _meter_concatenations(parent: nodes.Node) -> None:
    for field, value in list(parent.iter_fields()):
        if isinstance(value, nodes.Concat):
            setattr(parent, field, nodes.Filter(value, "metered", [], [], None, None))
        elif isinstance(value, list):
            value[:] = [
                nodes.Filter(item, "metered", [], [], None, None) if isinstance(item, nodes.Concat) else item
                for item in value
            ]


def _spend(steps: int, characters: int = 0) -> None:
    budget = _budget.get(None)
    if budget is None:
        return  # a constant, folded once when the template is compiled
    budget.steps -= steps
    budget.characters -= characters
    if budget.steps < 0 or budget.characters < 0:
        raise RunawayTemplateError("more steps or more text than any conversation needs")
    if budget.steps < budget.look_at_steps:
        budget.look_at_steps = budget.steps - _STEPS_PER_LOOK
        seconds = time.thread_time()
        if budget.end_seconds is None:
            budget.end_seconds = seconds + _MAX_SECONDS
        elif seconds > budget.end_seconds:
            raise RunawayTemplateError(f"more than {_MAX_SECONDS:g} s of work")


def _spend_for(result: Any) -> Any:
    _spend(1, len(result) if isinstance(result, str | list | tuple) else 0)
    return result


def _metered_items(items: Iterable[Any]) -> Iterator[Any]:
    """What every `for` goes through."""
    for item in items:
        _spend(1)
        yield item


def _metered(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps the mark by which Jinja passes its context to some filters
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _refuse_huge(*args, *kwargs.values())
        if function is jinja2.filters.do_format:
            _refuse_wide(*args)
        return _spend_for(function(*args, **kwargs))

    return wrapped


def _refuse_huge(*operands: Any) -> None:
    """Whatever the operation, its result is about as long as the product of its operands' sizes at most."""
    product = 1
    for operand in operands:
        if isinstance(operand, str | list | tuple):
            product *= max(1, len(operand))
        elif isinstance(operand, int):
            product *= max(1, operand)
    if product > _MAX_PRODUCT:
        raise RunawayTemplateError("a text or list of absurd size")


def _refuse_wide(format_string: str, *values: Any) -> None:
    if _WIDE_FORMAT.search(format_string):
        raise RunawayTemplateError("a format of absurd width")
    for value in values:
        _refuse_huge(*value) if isinstance(value, tuple) else _refuse_huge(value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML and sorts keys; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_string: str) -> str:
    return _budget.get().now.strftime(format_string)
