"""Texts of values on a page, and a page's data as JSON."""

from __future__ import annotations

import contextlib
import math
from datetime import datetime
from typing import Any

import msgspec


def as_json(data: Any, indent: int = 0) -> bytes:
    """Return data as JSON: `null` for what is no number, times in ISO 8601, bytes in base64."""
    text = msgspec.json.encode(data, enc_hook=str)
    return msgspec.json.format(text, indent=indent) if indent else text


def number(value: Any, digits: int = 3) -> str:
    """Return a figure with `digits` decimal places, or with three significant digits if these would all be 0. An `int`
    and a number from 1,000 on have none; `None` and NaN are a dash."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.{digits}f}"
    return f"{value:.{max(digits, 3)}g}" if value and not float(text) else text


def counted(value: int | None, noun: str) -> str:
    """Return a number with its noun: `1 call`, `2 calls`."""
    return f"{number(value)} {noun}{'' if value == 1 else 's'}"


def when(value: datetime | None) -> str:
    """Return a time to the second; a dash for `None`."""
    return value.strftime("%Y-%m-%d %H:%M:%S") if value else "–"


def short(value: Any, length: int = 200) -> str:
    """Return a text, or of a longer one the first `length` characters, with an ellipsis as the last."""
    text = "" if value is None else str(value)
    return text if len(text) <= length else text[: length - 1] + "…"


def pretty(value: Any) -> str:
    """Return a value, or a text of JSON, as indented JSON. A text that is no JSON is returned as it is."""
    with contextlib.suppress(msgspec.DecodeError):
        return as_json(msgspec.json.decode(value) if isinstance(value, str) else value, indent=1).decode()
    return str(value)


def signed(value: Any) -> str:
    """Return a difference with its sign; a dash for `None`."""
    if value is None:
        return "–"
    return f"{'−' if value < 0 else '+'}{number(abs(value))}"


def ago(seconds: float) -> str:
    """Return how long ago something was, in the largest unit that fits: `2 hours ago`."""
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1)):
        if (count := int(seconds // size)) >= 1:
            return f"{counted(count, unit)} ago"
    return "just now"


NAMES = {
    "entropy": "Entropy",
    "kl": "KL from the base model",
    "loss": "Loss",
    "grad_norm": "Gradient norm",
    "on_policy_logprob_diff": "Logprobs: trainer against sampler",
    "learning_rate": "Learning rate",
    "train": "training",
    "val": "held-out",
    "no_result": "no result",
    "masked": "masked by the agent",
    "too_small": "too few members",
    "late": "came too late",
    "unscored": "not scored",
    "no_variance": "equal rewards",
    "stale": "too old",
    "no_tokens": "no token to train",
    "history_gone": "calls no longer on the log",
    "over_budget": "over the budget",
    "validation": "held-out, never trained",
    "repeated": "trained before",
    "too_large": "too long for memory",
    "incomplete": "its batch lacks groups",
    "outside_model": "answered by an outside model",
    "judge_usd": "Judge, USD",
    "gpu_hours": "Compute, hours",
    "sampled_tokens": "Sampled tokens",
    "side_call": "a call beside the task",
    "cancelled": "the agent went away before the reply was complete",
    "failed": "the inference server broke off",
    "unsure": "the apprentice was unsure, and the agent got another answer",
    "truncated": "cut off at the length limit",
    "greedy": "chosen greedily",
    "unsupported": "sampled under settings that the trainer can't compute",
    "length": "ended at the length limit",
    "stop": "ended by itself",
    "tool_calls": "ended in a tool call",
}
"""What people read in place of names of the code."""


def name(value: Any) -> str:
    """Return the label that people read for an identifier of the code (`NAMES`), the identifier itself if it has none,
    and a dash for `None`."""
    return NAMES.get(value, str(value)) if value is not None else "–"
