"""The 95 % intervals of means that SQL computes.

A query averages the runs of a group first, because they are attempts at one task and so depend on each other; the
values of an interval are the groups' means.
"""

from __future__ import annotations

from collections.abc import Sequence

from journeywork.statistics import Sample, finite
from store.showing.pages.history import Row

SAMPLE = """avg("value") AS mean, count(*) AS groups, var_samp("value") AS variance, min("value") AS least,
      max("value") AS greatest"""
"""Columns of an aggregate over rows of groups, from which `with_intervals` computes `low` and `high`."""


def sample_of(row: Row) -> Sample:
    """Return the sample that the columns `SAMPLE` of a row describe."""
    return Sample(row["groups"], row["mean"], row["variance"], row["least"], row["greatest"])


def with_intervals(rows: Sequence[Row]) -> list[Row]:
    """Return rows that have the columns `SAMPLE` with the ends of the mean's interval, `low` and `high`, instead of the
    last three of them; an end is `None` if nothing is known of it."""
    shown = []
    for row in rows:
        low, high = map(finite, sample_of(row).interval())
        rest = {name: value for name, value in row.items() if name not in ("variance", "least", "greatest")}
        shown.append({**rest, "low": low, "high": high})
    return shown
