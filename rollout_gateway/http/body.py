"""The one reader of JSON bodies."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from pipeline.events.types import MAX_NUMBER
from rollout_gateway.http.errors import ApiError

_T = TypeVar("_T")

_MAX_DEPTH = 200
"""Lists and objects within each other. What is on the log is decoded again by judge, trainer and others, in deeper
calls of their own than the gateway's, and Python bounds calls and nesting together."""
_MAX_VALUES = 1_000_000
"""Values in lists and objects. A value of two bytes takes a hundred once it is decoded."""
_MAX_LISTS = 100_000
"""Lists and objects. Each takes as long as ten other values to decode, check and translate."""
_NO_SIGNS = bytes(set(range(256)).difference(b',[]{}"'))
_ALIKE = bytes.maketrans(b"{}", b"[]")
_TEXT = re.compile(rb'"[^"]*"')
_WHERE = re.compile(r"`\$\.([^`]*)`$")
_FIELD = re.compile(r"(?:unknown|missing required) field `([^`]*)`")
_HALF = re.compile("[\ud800-\udfff]")


def read_body(body: bytes, kind: type[_T]) -> _T:
    """Decode `body` as `kind`. Raises a 400 `ApiError` that says what is wrong, and names the field in `param` if one
    is."""
    try:
        outline = _outline(body)
        body.decode()  # also what `msgspec.Raw` skips has to be valid UTF-8
        read = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        where, field = _WHERE.search(str(error)), _FIELD.search(str(error))
        param = ".".join(match[1] for match in (where, field) if match) or None
        message = f"The body is not valid: {error}.{_advice(str(error), param, kind)}"
        raise ApiError(400, "invalid_body", message, param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _no_json(body, error) from error
    except RecursionError as error:
        raise _too_deep() from error
    if _is_deep(outline):
        raise _too_deep()
    return read


def _outline(body: bytes) -> bytes:
    """Return the commas and brackets of a body outside its texts, with `[` and `]` for those of objects too. Raises a
    413 `ApiError` if there are too many. The body need not be valid, and then neither is the outline."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # no escaped quotes
    signs = plain.translate(_ALIKE, _NO_SIGNS)
    too_many = signs.count(b'"') > 4 * _MAX_VALUES  # a value has at most two texts, its name and itself
    if not too_many:
        signs = _TEXT.sub(b"", signs.replace(b'""', b""))
        lists = signs.count(b"[")
        too_many = lists > _MAX_LISTS or lists + signs.count(b",") > _MAX_VALUES
    if too_many:
        message = (
            f"The body holds too many values: at most {_MAX_VALUES:,}, of which at most {_MAX_LISTS:,} are lists or "
            "objects. Send less in a request."
        )
        raise ApiError(413, "body_too_large", message)
    return signs


def _is_deep(outline: bytes) -> bool:
    """Whether a valid body with this outline has more than `_MAX_DEPTH` lists and objects within each other."""
    if outline.count(b"[") <= _MAX_DEPTH:
        return False
    brackets = outline.replace(b",", b"")
    return max(accumulate(map((92).__sub__, brackets)), default=0) > _MAX_DEPTH  # [ is 91, ] is 93


def _too_deep() -> ApiError:
    message = f"The body is nested too deeply: at most {_MAX_DEPTH} lists and objects within each other"
    return ApiError(400, "invalid_json", message)


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


def _no_json(body: bytes, error: Exception) -> ApiError:
    """The error about a body that is no JSON. It names the first number or text that only Python takes for JSON."""
    for path, value in _leaves(_loaded(body)):
        why = ""
        if isinstance(value, float) and not math.isfinite(value):
            why = f"{path} must be a finite number; JSON has no NaN or Infinity"
        elif isinstance(value, str) and _HALF.search(value):
            path = path.encode(errors="replace").decode()
            why = f"half of a surrogate pair (\\ud800 to \\udfff) stands alone in {path}"
        if why:
            return ApiError(400, "invalid_body", f"The body is not valid: {why}.", param=path)
    return ApiError(400, "invalid_json", f"The body is not valid JSON: {error}")


def _loaded(body: bytes) -> dict[str, Any]:
    """The object in a body that Python can read, though it is not JSON: with NaN, infinite numbers and halves of
    surrogate pairs, which can't be written as UTF-8. Else it is empty."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def check_numbers(value: Any) -> None:
    """Raise a 400 `ApiError` that names the first float in `value`, a decoded body, that is beyond `MAX_NUMBER`."""
    for path, number in _leaves(value):
        if isinstance(number, float) and not abs(number) <= MAX_NUMBER:
            message = f"The body is not valid: {path} is {number:g}; it must be from -{MAX_NUMBER:g} to {MAX_NUMBER:g}."
            raise ApiError(400, "invalid_body", message, param=path)


def _leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names in dicts, and the values in dicts, lists and tuples that are none of these, each with its path,
    in their order."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            for name, inner in reversed(value.items()):
                waiting += [(f"{path}.{name}", inner), (f"{path}.{name}", name)]
        elif isinstance(value, list | tuple):
            waiting += [(f"{path}[{at}]", value[at]) for at in reversed(range(len(value)))]
        else:
            yield path.lstrip("."), value
