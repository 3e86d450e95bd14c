"""Decodes the JSON bodies of requests, control calls and model calls alike.

A body is bounded before it is decoded, since a value of two bytes takes a hundred in memory. What is counted is its
outline: the commas and brackets that stand outside its strings."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import TypeVar

import msgspec

from rollout_gateway.http.errors import ApiError, invalid_body

_T = TypeVar("_T")

_MAX_DEPTH = 200
"""Lists and objects within each other. What is on the log is decoded again by judge, trainer and others, in deeper
calls of their own than the gateway's, and Python bounds calls and nesting together."""
_MAX_VALUES = 1_000_000
"""Values in lists and objects."""
_MAX_LISTS = 100_000
"""Lists and objects. Each takes as long as ten other values to decode, check and translate."""
_NOT_IN_OUTLINE = bytes(set(range(256)).difference(b',[]{}"'))
_BRACES_AS_BRACKETS = bytes.maketrans(b"{}", b"[]")
_STRING = re.compile(rb'"[^"]*"')
_WHERE = re.compile(r"`\$\.([^`]*)`$")
_FIELD = re.compile(r"(?:unknown|missing required) field `([^`]*)`")


def read_body(body: bytes, kind: type[_T]) -> _T:
    """Decode `body` as `kind`. Raises an `ApiError`: 413 if it has too many values, 400 if it is nested too deeply or
    not a `kind`; that one says what is wrong, and names the field in `param` if one is."""
    try:
        outline = _outline(body)
        body.decode()  # also what `msgspec.Raw` skips has to be valid UTF-8
        read = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        where, field = _WHERE.search(str(error)), _FIELD.search(str(error))
        param = ".".join(match[1] for match in (where, field) if match) or None
        raise invalid_body(f"The body is not valid: {error}.{_advice(str(error), param, kind)}", param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = " JSON has no NaN and no Infinity." if b"NaN" in body or b"Infinity" in body else ""
        raise ApiError(400, "invalid_json", f"The body is not valid JSON: {error}.{hint}") from error
    except RecursionError as error:
        raise _too_deep_error() from error
    if _is_too_deep(outline):
        raise _too_deep_error()
    return read


def _outline(body: bytes) -> bytes:
    """Return the outline of a body, with `[` and `]` for the braces of objects too: `[[],,]` for `{"a": [], "b": 1,
    "c": 2}`. Takes linear time. Raises a 413 `ApiError` if there are too many values. The body need not be valid, and
    then neither is the outline."""
    without_escaped_quotes = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    outline = without_escaped_quotes.translate(_BRACES_AS_BRACKETS, _NOT_IN_OUTLINE)
    # A value has at most two strings, its name and itself. More quotes are not worth the search for pairs.
    too_many = outline.count(b'"') > 4 * _MAX_VALUES
    if not too_many:
        outline = _STRING.sub(b"", outline.replace(b'""', b""))
        lists = outline.count(b"[")
        too_many = lists > _MAX_LISTS or lists + outline.count(b",") > _MAX_VALUES
    if too_many:
        message = (
            f"The body holds too many values: at most {_MAX_VALUES:,}, of which at most {_MAX_LISTS:,} are lists or "
            "objects. Send less in a request."
        )
        raise ApiError(413, "body_too_large", message)
    return outline


def _is_too_deep(outline: bytes) -> bool:
    """Whether a valid body with this outline has more than `_MAX_DEPTH` lists and objects within each other."""
    if outline.count(b"[") <= _MAX_DEPTH:
        return False
    depths = accumulate(1 if sign == ord("[") else -1 for sign in outline.replace(b",", b""))
    return max(depths) > _MAX_DEPTH


def _too_deep_error() -> ApiError:
    """Return the 400 for a body that is nested too deeply."""
    message = f"The body is nested too deeply: at most {_MAX_DEPTH} lists and objects within each other"
    return ApiError(400, "invalid_json", message)


def _advice(error: str, param: str | None, kind: type) -> str:
    """Return a sentence to add to msgspec's `error` about a body of this kind: the fields of the body, if the error is
    about an unknown one at its top level; or the values that the field `param` may have, if it takes only some. Empty
    otherwise."""
    fields = getattr(msgspec.inspect.type_info(kind), "fields", ())
    if "unknown field" in error and "`$" not in error:
        return f" The fields are {', '.join(f.encode_name for f in fields)}."
    types = [f.type for f in fields if f.encode_name == param]
    alternatives = [t for field_type in types for t in getattr(field_type, "types", (field_type,))]
    values = [str(v) for t in alternatives if isinstance(t, msgspec.inspect.LiteralType) for v in t.values]
    return f" It is one of {', '.join(values)}." if values else ""
