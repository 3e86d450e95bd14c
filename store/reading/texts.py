"""Texts of values on a page, and a page's data as JSON."""

from __future__ import annotations

import contextlib
import json
import math
from datetime import date, datetime
from typing import Any

import msgspec


def plain(value: Any) -> Any:
    """What JSON can hold: no NaN, no bytes, times in ISO 8601."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, msgspec.Struct):
        return plain(msgspec.structs.asdict(value))
    return value


def as_json(data: dict[str, Any]) -> bytes:
    """A page's data as JSON."""
    return json.dumps(plain(data), ensure_ascii=False, default=str).encode()


def number(value: Any, digits: int = 3) -> str:
    """A figure with so many decimal places, a whole number with none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def when(value: datetime | None) -> str:
    """A time to the second."""
    return value.strftime("%Y-%m-%d %H:%M:%S") if value else "–"


def short(value: Any, length: int = 200) -> str:
    """The beginning of a long text."""
    text = "" if value is None else str(value)
    return text if len(text) <= length else text[: length - 1] + "…"


def pretty(text: Any) -> str:
    """JSON with line breaks; a text that is no JSON as it is."""
    with contextlib.suppress(ValueError, TypeError):
        return json.dumps(
            json.loads(text) if isinstance(text, str) else plain(text), indent=1, ensure_ascii=False
        )
    return str(text)
