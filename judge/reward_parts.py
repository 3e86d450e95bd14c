"""How the parts of a reward (`judge.rewards`) become one number, and which numbers may be a reward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeGuard

from pipeline.config import JudgeConfig
from pipeline.events.types import MAX_NUMBER


def combine(config: JudgeConfig, components: Mapping[str, float]) -> float:
    """Combine the parts of a reward, by the names of `judge.rewards`, as `judge.combine` says. Weights do not count for
    `product` and `min`."""
    weights = {r.name: r.weight for r in config.rewards}
    weighted = math.fsum(weights[n] * v for n, v in components.items())
    match config.combine:
        case "product":
            return math.prod(components.values())
        case "min":
            return min(components.values())
        case "sum":
            return weighted
        case "mean":
            total = math.fsum(abs(weights[n]) for n in components)
            return weighted / total if total else 0.0


def is_usable(value: float | None) -> TypeGuard[float]:
    """Return whether a number may be a reward or a part of one: it is finite and at most `MAX_NUMBER`."""
    return value is not None and abs(value) <= MAX_NUMBER
