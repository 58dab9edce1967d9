"""A model's chat template: messages -> the text that the tokenizer sees, equal to transformers' `apply_chat_template`.

    content "..."                              passed on
    content [{"type": "text", "text": ...}]    passed on to a template that walks over parts; for any other template the
                                               texts are joined by newlines, as vLLM does
    content None, tool_calls None, ...         left out
    tool_calls[].function.arguments "{...}"    parsed, because templates write them out as JSON themselves

A special token spelled out in a user's text is that special token, as with transformers and the engines built on it:
router and engine agree on it, and whoever must not be able to write them filters before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes

from shared.template_sandbox import RunawayTemplateError, TemplateSandbox
from shared.template_splice import Rendered, TemplateSplice
from shared.tokenizer_bundle import BundleError

__all__ = ["ChatTemplate", "PromptError"]

_CONTINUE_MARK = "\ue000continue\ue000 "
"""Put at the end of the final message to find it again. Ends with a space: where that is gone, the template trims."""

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})

Message = dict[str, Any]


class PromptError(ValueError):
    """The request cannot be turned into a prompt. `param` names the field of the request, where there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ChatTemplate:
    """Compiled once; `parts` is a pure function of its arguments (and of the date, where a template asks for it)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises BundleError where `source` is not a template."""
        self._sandbox = TemplateSandbox()
        try:
            tree = self._sandbox.parse(source)
            self._walks_parts = _walks_parts(tree)
            self._template = self._sandbox.from_string(source)
        except (jinja2.TemplateError, RunawayTemplateError, RecursionError) as error:
            raise BundleError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._splice = TemplateSplice(tree, self._render_plain)

    def render(self, messages: Sequence[Mapping[str, Any]], *arguments: Any, **options: Any) -> str:
        """As `parts`, in one."""
        return "".join(self.parts(messages, *arguments, **options))

    def parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> Rendered:
        """Raises PromptError. `now` is for tests and golden prompts; templates see local time, as in transformers."""
        if not messages:
            raise PromptError("messages must not be empty", "messages")
        if continue_final_message and add_generation_prompt:
            raise PromptError(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
                "continue_final_message",
            )
        if not (tools or template_kwargs or continue_final_message or now):
            spliced = self._splice.parts(messages, add_generation_prompt)
            if spliced is not None:
                return spliced
        for name in template_kwargs or {}:
            if name in _RESERVED:
                raise PromptError(f"chat_template_kwargs must not set {name}", f"chat_template_kwargs.{name}")
        plain = [self._plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
        variables = {
            **self._special_tokens,
            **(template_kwargs or {}),
            "messages": plain,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if not continue_final_message:
            return Rendered("", self._run(variables, now))
        final_text = _mark_final_message(plain[-1])
        return Rendered("", _cut_at_mark(self._run(variables, now), final_text))

    def _render_plain(self, messages: list[Message], add_generation_prompt: bool) -> str:
        variables = {
            **self._special_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._run(variables, None)

    def _run(self, variables: Mapping[str, Any], now: datetime | None) -> str:
        try:
            return self._sandbox.run(self._template, variables, now or datetime.now())
        except RunawayTemplateError as error:
            raise PromptError(f"the model's chat template was stopped: {error}", "messages") from error
        except Exception as error:  # a template is a program of strangers: it may fail in any way
            raise PromptError(
                f"the model's chat template does not accept these messages: {error}", "messages"
            ) from error

    def _plain_message(self, message: Mapping[str, Any], where: str) -> Message:
        plain = {name: value for name, value in message.items() if value is not None}
        if not isinstance(plain.get("role"), str):
            raise PromptError("each message needs a role, as a string", f"{where}.role")
        content = plain.get("content")
        if isinstance(content, list):
            texts = [_text_of_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
            if self._walks_parts:
                plain["content"] = [{"type": "text", "text": text} for text in texts]
            else:
                plain["content"] = "\n".join(texts)
        elif content is not None and not isinstance(content, str):
            raise PromptError("content must be a string or a list of text parts", f"{where}.content")
        if isinstance(plain.get("tool_calls"), list):
            plain["tool_calls"] = [_with_parsed_arguments(call) for call in plain["tool_calls"]]
        reasoning = next((plain[name] for name in _REASONING_FIELDS if name in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        return plain


def _text_of_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise PromptError(f"content parts of type {kind!r} are not supported here; send text parts", f"{where}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise PromptError("a text part needs text, as a string", f"{where}.text")
    return text


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        parsed = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return call  # a model may have written broken JSON; the template shows it as it was
    return {**call, "function": {**function, "arguments": parsed}}


def _mark_final_message(message: Message) -> str:
    """Appends the mark to the message's text, in place; returns the text before."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_MARK
        return content
    if isinstance(content, list) and content:
        text: str = content[-1]["text"]
        content[-1]["text"] = text + _CONTINUE_MARK
        return text
    raise PromptError("continue_final_message needs a final message with text to continue", "messages")


def _cut_at_mark(rendered: str, final_text: str) -> str:
    position = rendered.rfind(_CONTINUE_MARK.strip())
    if position < 0 or final_text.strip() not in rendered:
        raise PromptError("the model's chat template changes the final message; it cannot be continued", "messages")
    untrimmed = rendered.startswith(_CONTINUE_MARK, position)
    return rendered[:position] if untrimmed else rendered[:position].rstrip()


def _walks_parts(tree: nodes.Template) -> bool:
    """Whether the template looks into a list of content parts, rather than write `content` out as one string."""
    names = {"content"}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    if any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For)):
        return True
    return any(
        picked.name in {"selectattr", "rejectattr", "map"} and picked.node and _is_content(picked.node, names)
        for picked in tree.find_all(nodes.Filter)
    )


def _is_content(expression: nodes.Node, names: set[str]) -> bool:
    match expression:
        case nodes.Filter(node=nodes.Node() as inner):
            return _is_content(inner, names)
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name(name=name):
            return name in names
        case _:
            return False
