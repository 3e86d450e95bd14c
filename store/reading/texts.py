"""Texts of values on a page, and a page's data as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
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
    if isinstance(value, msgspec.Struct) or dataclasses.is_dataclass(value):
        return plain(msgspec.to_builtins(value, builtin_types=(datetime,)))
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


def signed(value: Any) -> str:
    """A difference with its sign."""
    return "–" if value is None else f"{value:+,.3f}".replace("-", "−")


def ago(seconds: float) -> str:
    """How long ago something was, in the largest unit that fits."""
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1)):
        if (count := int(seconds // size)) >= 1:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


NAMES = {
    "entropy": "Entropy", "kl": "KL from the base model", "loss": "Loss", "grad_norm": "Gradient norm",
    "on_policy_logprob_diff": "Logprobs: trainer against sampler", "learning_rate": "Learning rate",
    "train": "training", "val": "held-out", "no_result": "no result", "too_small": "too few members",
    "late": "came too late", "unscored": "not scored", "no_variance": "equal rewards", "stale": "too old",
    "history_gone": "calls no longer on the log", "over_budget": "over the budget",
    "validation": "held-out, never trained", "repeated": "trained before", "too_large": "too long for memory",
    "incomplete": "its batch lacks groups",
    "side_call": "a call beside the task", "cancelled": "the agent went away before the reply was complete",
    "failed": "the inference server broke off", "truncated": "cut off at the length limit",
    "greedy": "chosen greedily", "unsupported": "sampled under settings that the trainer can't compute",
    "length": "ended at the length limit", "stop": "ended by itself", "tool_calls": "ended in a tool call",
}  # fmt: skip
"""What people read in place of names of the code."""


def name(value: Any) -> str:
    """The name for people of something that the code has a name for."""
    return NAMES.get(value, str(value)) if value is not None else "–"
