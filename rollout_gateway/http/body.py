"""The one reader of JSON bodies."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from rollout_gateway.http.errors import ApiError

_T = TypeVar("_T")

_WHERE = re.compile(r"`\$\.([^`]*)`$")
_FIELD = re.compile(r"(?:unknown|missing required) field `([^`]*)`")


def read_body(body: bytes, kind: type[_T]) -> _T:
    """Decode `body` as `kind`. Raises a 400 `ApiError` that says what is wrong, and names the field in `param` if one
    is."""
    try:
        body.decode()  # also what `msgspec.Raw` skips has to be valid UTF-8
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        where, field = _WHERE.search(str(error)), _FIELD.search(str(error))
        param = ".".join(match[1] for match in (where, field) if match) or None
        raise ApiError(400, "invalid_body", f"The body is not valid: {error}.", param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, "invalid_json", f"The body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ApiError(400, "invalid_json", "The body is not valid JSON: it is nested too deeply") from error
