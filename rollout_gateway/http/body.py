"""The one reader of JSON bodies."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from pipeline.events.types import MAX_NUMBER
from rollout_gateway.http.errors import ApiError

_T = TypeVar("_T")

_WHERE = re.compile(r"`\$\.([^`]*)`$")
_FIELD = re.compile(r"(?:unknown|missing required) field `([^`]*)`")
_CONSTANT = re.compile(rb"NaN|Infinity")


def read_body(body: bytes, kind: type[_T]) -> _T:
    """Decode `body` as `kind`. Raises a 400 `ApiError` that says what is wrong, and names the field in `param` if one
    is."""
    try:
        body.decode()  # also what `msgspec.Raw` skips has to be valid UTF-8
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        where, field = _WHERE.search(str(error)), _FIELD.search(str(error))
        param = ".".join(match[1] for match in (where, field) if match) or None
        message = f"The body is not valid: {error}.{_advice(str(error), param, kind)}"
        raise ApiError(400, "invalid_body", message, param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if path := _not_finite(body):
            message = (
                f"The body is not valid: {path} must be a finite number; JSON has no NaN and no Infinity."
            )
            raise ApiError(400, "invalid_body", message, param=path) from error
        raise ApiError(400, "invalid_json", f"The body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ApiError(400, "invalid_json", "The body is not valid JSON: it is nested too deeply") from error


def _advice(error: str, param: str | None, kind: type) -> str:
    """What a field of the body's top level may be, or which fields there are."""
    described = msgspec.inspect.type_info(kind)
    fields = getattr(described, "fields", ())
    if "unknown field" in error and "`$" not in error:
        return f" The fields are {', '.join(f.encode_name for f in fields)}."
    types = [f.type for f in fields if f.encode_name == param]
    alternatives = [t for one in types for t in getattr(one, "types", (one,))]
    values = [str(v) for t in alternatives if isinstance(t, msgspec.inspect.LiteralType) for v in t.values]
    return f" It is one of {', '.join(values)}." if values else ""


def _not_finite(body: bytes) -> str:
    """Return the path of the first NaN or infinite number in a body that is JSON otherwise; empty if there is none."""
    if not _CONSTANT.search(body):
        return ""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    return next((path for path, number in _numbers(value) if not math.isfinite(number)), "")


def check_numbers(value: Any) -> None:
    """Raise a 400 `ApiError` that names the first float in `value`, a decoded body, that is beyond `MAX_NUMBER`."""
    for path, number in _numbers(value):
        if not abs(number) <= MAX_NUMBER:
            message = f"The body is not valid: {path} is {number:g}; it must be from -{MAX_NUMBER:g} to {MAX_NUMBER:g}."
            raise ApiError(400, "invalid_body", message, param=path)


def _numbers(value: Any) -> Iterator[tuple[str, float]]:
    """Yield the floats in dicts, lists and tuples, each with its path, in their order."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, float):
            yield path.lstrip("."), value
        elif isinstance(value, dict):
            waiting += [(f"{path}.{name}", inner) for name, inner in reversed(value.items())]
        elif isinstance(value, list | tuple):
            waiting += [(f"{path}[{at}]", value[at]) for at in reversed(range(len(value)))]
