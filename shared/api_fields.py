"""A request's JSON body as named fields, each read through a check that names the field when it fails.

`null` means absent, as in both dialects. Fields nobody reads are accepted; fields that would change the answer and are
not built are refused by `refuse_unless_neutral`, so that nothing is silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from shared.api_errors import ApiError, invalid_value, unsupported

__all__ = ["Decode", "Fields", "decode_object", "decoder_of"]

_MOST_TOKEN_ID = (1 << 32) - 1

_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKEN_ID)]]

Decode = Callable[[bytes], dict[str, Any]]


def decoder_of(shape: Any) -> Decode:
    """A decoder of objects of this shape (`dict`, or a TypedDict whose other fields are skipped undecoded)."""
    return msgspec.json.Decoder(shape).decode


def decode_object(decode: Decode, body: bytes) -> Fields:
    """Raises ApiError 400 `invalid_json` for everything that is not one JSON object."""
    try:
        return Fields(decode(body))
    except msgspec.ValidationError as error:
        raise ApiError(400, "invalid_json", f"the body must be a JSON object with values in range: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, "invalid_json", f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise ApiError(400, "invalid_json", "the body is nested too deeply: flatten it") from None


class Fields:
    """Typed reads of one JSON object; `where` is the path of that object inside the body, for messages."""

    __slots__ = ("_where", "values")

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values = values
        self._where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def raw(self, name: str) -> Any:
        return self.values.get(name)

    def required(self, name: str) -> Any:
        value = self.values.get(name)
        if value is None:
            raise invalid_value(self.path(name), "is required", "missing_required_parameter")
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong_type(name, "a string", value)
        return value

    def required_text(self, name: str) -> str:
        self.required(name)
        value = self.text(name)
        if not value:
            raise invalid_value(self.path(name), "must not be empty")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong_type(name, "true or false", value)
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong_type(name, "an integer", value)
        if not low <= value <= high:
            raise invalid_value(self.path(name), f"must be between {low} and {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float, *, above_low: bool = False) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong_type(name, "a number", value)
        if not low <= value <= high or (above_low and value == low):
            bounds = f"above {low} and at most {high}" if above_low else f"between {low} and {high}"
            raise invalid_value(self.path(name), f"must be {bounds}")
        return float(value)

    def objects(self, name: str) -> list[dict[str, Any]]:
        """A list of objects; absent is empty."""
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong_type(name, "a list of objects", value)
        for index, item in enumerate(value):
            if not isinstance(item, dict):
                raise invalid_value(f"{self.path(name)}[{index}]", "must be an object", "invalid_type")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._wrong_type(name, "an object", value)
        return value

    def nested(self, name: str) -> Fields:
        return Fields(self.mapping(name), self.path(name))

    def texts(self, name: str, *, most: int, longest: int) -> tuple[str, ...]:
        """One string or a list of them, each 1 to `longest` characters; absent is empty."""
        value = self.values.get(name)
        if value is None:
            return ()
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self._wrong_type(name, "a string or a list of strings", value)
        if len(texts) > most:
            raise invalid_value(self.path(name), f"has {len(texts)} entries: at most {most} are allowed")
        if not all(0 < len(text) <= longest for text in texts):
            raise invalid_value(self.path(name), f"must hold strings of 1 to {longest} characters")
        return tuple(texts)

    def token_ids(self, name: str, *, most: int | None = None) -> list[int]:
        value = self.values.get(name)
        if value is None:
            return []
        try:
            ids = msgspec.convert(value, _TokenIds)
        except msgspec.ValidationError as error:
            raise invalid_value(self.path(name), f"must be a list of token ids: {error}", "invalid_type") from None
        if most is not None and len(ids) > most:
            raise invalid_value(self.path(name), f"has {len(ids)} entries: at most {most} are allowed")
        return ids

    def refuse_unless_neutral(self, neutral_values: Mapping[str, tuple[object, ...]]) -> None:
        """Refuse each named field whose value would change the answer; absent and null never do."""
        for name, neutral in neutral_values.items():
            value = self.values.get(name)
            if value is not None and not any(_same(value, other) for other in neutral):
                advice = "leave it out" if not neutral else f"leave it out or send {_shown(neutral[0])}"
                raise unsupported(self.path(name), advice)

    def _wrong_type(self, name: str, wanted: str, value: object) -> ApiError:
        return invalid_value(self.path(name), f"must be {wanted}, not {_kind(value)}", "invalid_type")


def _same(value: object, other: object) -> bool:
    # In Python True == 1, in JSON it is another type.
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _shown(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _kind(value: object) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "null")
