"""Renderings of conversations seen before but for their last message: its text is put in, nothing is rendered.

    [system A, user "x"]   ->   (before, "x" + after)         before and after remembered for [system A, user ...]

Templates are programs and could do anything with a text; that this one only passes it on is made sure three times.

    once       probes: texts of every kind must come out as they went in, between the same before and after
    each time  a template can only look for what is spelled in it: texts that hold such a string, and those that it
               might trim, are rendered in full
    now and then, and before a conversation is remembered, the rendering in full must be equal; one that is not ends
               splicing for this template for good
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from jinja2 import nodes

from shared.byte_lru import ByteLru

__all__ = ["Rendered", "TemplateSplice"]

_MEMO_BYTES = 16 * 2**20
_ENTRY_OVERHEAD_BYTES = 500
_CHECK_EVERY = 64
_MARK = "\ue000the text\ue000"
_CHANGES_BY_ITSELF = frozenset({"strftime_now", "random"})
_PROBES = (
    "x",
    "Hello, World! 42",
    "naïve café, 東京, 🙂",
    '{"a": ["b", null]} <b>&amp;</b>',
    "one\ntwo\n\n  three\tfour",
    "'single' \"double\" \\ %s %(a)s {0} {{ b }} {% c %} {# d #}",
    "1234567890" * 50,
)
_OPENINGS: tuple[tuple[tuple[str, str], ...], ...] = (
    (),
    (("system", "Be brief."),),
    (("system", "Be brief."), ("user", "Why?"), ("assistant", "Because.")),
)

_logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[list[dict[str, Any]], bool], str]
"""Messages and whether the generation prompt is added -> the text. May raise anything."""


class Rendered(NamedTuple):
    """The text is both, one behind the other. Prompts that begin alike have the same object for their opening."""

    opening: str
    rest: str


class _Ends(msgspec.Struct, frozen=True, gc=False):
    before: str
    after: str


class TemplateSplice:
    """For conversations of plain messages that end with the user's."""

    def __init__(self, tree: nodes.Template, render: Render) -> None:
        self._render = render
        self._looked_for, self._compared = _strings_asked_for(tree)
        self._known: ByteLru[tuple[object, ...], _Ends] = ByteLru(_MEMO_BYTES)
        self._seen_once: ByteLru[int, bool] = ByteLru(_MEMO_BYTES // 16)
        self._spliced = 0
        names = {name.name for name in tree.find_all(nodes.Name)} | {used.name for used in tree.find_all(nodes.Filter)}
        self.works = not names & _CHANGES_BY_ITSELF and self._passes_probes()

    def parts(self, messages: Messages, add_generation_prompt: bool) -> Rendered | None:
        """What rendering would give; None where that has to be done in full."""
        if not self.works or not _all_plain(messages) or messages[-1]["role"] != "user":
            return None
        content: str = messages[-1]["content"]
        if not self._passes_through(content):
            return None
        opening: tuple[object, ...] = (add_generation_prompt,)
        for message in messages[:-1]:
            opening += (message["role"], message["content"])
        ends = self._known.get(opening)
        if ends is None:
            return self._learn(opening, messages, add_generation_prompt)
        spliced = Rendered(ends.before, content + ends.after)
        self._spliced += 1
        if self._spliced % _CHECK_EVERY == 0:
            return self._checked(spliced, messages, add_generation_prompt)
        return spliced

    def _learn(self, opening: tuple[object, ...], messages: Messages, add_generation_prompt: bool) -> Rendered | None:
        """At the second time: most beginnings of conversations come once."""
        digest = hash(opening)
        if self._seen_once.get(digest) is None:
            self._seen_once.put(digest, True, _ENTRY_OVERHEAD_BYTES)
            return None
        ends = self._ends(messages[:-1], add_generation_prompt)
        if ends is None:
            return None
        size = 2 * len(ends.before) + len(ends.after) + _ENTRY_OVERHEAD_BYTES
        self._known.put(opening, ends, size)
        return self._checked(
            Rendered(ends.before, messages[-1]["content"] + ends.after), messages, add_generation_prompt
        )

    def _ends(self, opening: Messages, add_generation_prompt: bool) -> _Ends | None:
        marked = [*map(dict, opening), {"role": "user", "content": _MARK}]
        before, mark, after = self._render(marked, add_generation_prompt).partition(_MARK)
        return _Ends(before, after) if mark and _MARK not in after else None

    def _checked(self, spliced: Rendered, messages: Messages, add_generation_prompt: bool) -> Rendered:
        rendered = self._render(list(map(dict, messages)), add_generation_prompt)
        if rendered == spliced.opening + spliced.rest:
            return spliced
        self.works = False
        _logger.warning("a chat template treats like texts differently: each prompt is rendered in full")
        return Rendered("", rendered)

    def _passes_through(self, content: str) -> bool:
        if not content or content[0].isspace() or content[-1].isspace() or content in self._compared:
            return False
        return not any(string in content or content in string for string in self._looked_for)

    def _passes_probes(self) -> bool:
        passed = False
        for opening in _OPENINGS:
            messages = [{"role": role, "content": content} for role, content in opening]
            for add_generation_prompt in (False, True):
                try:
                    ends = self._ends(messages, add_generation_prompt)
                    if ends is None:
                        return False
                    for probe in filter(self._passes_through, _PROBES):
                        asked = [*messages, {"role": "user", "content": probe}]
                        if self._render(asked, add_generation_prompt) != ends.before + probe + ends.after:
                            return False
                except Exception:  # noqa: S112 - a program of strangers; it takes no such conversation
                    continue
                passed = True
        return passed


def _all_plain(messages: Messages) -> bool:
    for message in messages:
        if len(message) != 2 or type(message.get("role")) is not str or type(message.get("content")) is not str:
            return False
    return True


def _strings_asked_for(tree: nodes.Template) -> tuple[frozenset[str], frozenset[str]]:
    """Strings that the template may look for inside a text, and those that it compares with a whole one."""
    compared: set[str] = set()
    harmless: set[int] = set()
    for node in tree.find_all(nodes.Compare):
        for operand in node.ops:
            if operand.op in ("eq", "ne"):
                sides = [node.expr, operand.expr]
            elif operand.op in ("in", "notin") and isinstance(operand.expr, nodes.List | nodes.Tuple):
                sides = operand.expr.items
            else:
                continue
            compared.update(_constants(sides, harmless))
    for item in tree.find_all((nodes.Getitem, nodes.Getattr)):
        _constants([item.arg] if isinstance(item, nodes.Getitem) else [], harmless)
    for written in tree.find_all((nodes.Output, nodes.Concat, nodes.Add)):
        _constants(written.iter_child_nodes(), harmless)
    looked_for = {
        constant.value
        for constant in tree.find_all(nodes.Const)
        if isinstance(constant.value, str) and constant.value and id(constant) not in harmless
    }
    return frozenset(looked_for), frozenset(compared)


def _constants(expressions: Iterable[nodes.Node], harmless: set[int]) -> Iterator[str]:
    """The strings among these expressions, which are noted as harmless inside a text."""
    found = [node for node in expressions if isinstance(node, nodes.Const) and isinstance(node.value, str)]
    harmless.update(map(id, found))
    return iter([node.value for node in found])
