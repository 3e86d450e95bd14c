"""The 95 % intervals of means that SQL computes.

A query averages the runs of a group first, because they are attempts at one task and so depend on each other; the
values of an interval are the groups' means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from journeywork.statistics import Sample
from store.showing.pages.history import Row

SAMPLE = """avg("value") AS mean, count(*) AS groups, var_samp("value") AS variance, min("value") AS least,
      max("value") AS greatest"""
"""Columns of an aggregate over rows of groups, from which `with_intervals` computes `low` and `high`."""


def sample_of(row: Row) -> Sample:
    """Return the sample that the columns `SAMPLE` of a row describe."""
    return Sample(row["groups"], row["mean"], row["variance"], row["least"], row["greatest"])


def with_intervals(rows: Sequence[Row]) -> list[Row]:
    """Return rows that have the columns `SAMPLE` with `low` and `high` instead of the last three of them; `None` if
    nothing is known."""
    rest = ({k: v for k, v in row.items() if k not in ("variance", "least", "greatest")} for row in rows)
    ends = (map(finite, sample_of(row).interval()) for row in rows)
    return [{**row, **dict(zip(("low", "high"), pair, strict=True))} for row, pair in zip(rest, ends, strict=True)]


def finite(value: float) -> float | None:
    """Return `value`, `None` if it is infinite, which JSON does not know."""
    return value if math.isfinite(value) else None
