"""The report of an evaluation for a terminal. The dashboard draws the same figures, and SQL has each task.

It is two tables: the means of each measure (the reward, a metric) by entrant, with the paired differences to the first
entrant, and what the runs took. A sentence between them names each entrant that lacks rewards or whose runs failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from journeywork.evaluation.results import EntrantResult, EvaluationReport
from journeywork.statistics import Estimate

_ERRORS = 5
"""Errors that the report tells of each entrant: the most frequent ones."""

Table = tuple[tuple[str, ...], Sequence[tuple[str, ...]]]
"""The names of the columns, and the cells of each row."""


def text_report(report: EvaluationReport) -> str:
    """Return means, differences, cost and latency for a terminal. A star marks an interval that does not contain 0."""
    first = report.entrants[0].entrant.name
    errors = [
        f"{result.entrant.name}: {count:,} runs failed: {error}"
        for result in report.entrants
        for error, count in Counter(result.errors).most_common(_ERRORS)
    ]
    lines = [
        _text_table(_means_table(report)),
        f"Differences are to {first}, paired by task; * marks an interval that does not contain 0.",
        *_unrewarded(report),
        *errors,
        _text_table(_costs_table(report)),
    ]
    return "\n\n".join(lines)


def _text_table(table: Table) -> str:
    """Return a table whose columns are as wide as their longest cell."""
    head, rows = table
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join(line.rstrip() for line in lines)


def _unrewarded(report: EvaluationReport) -> list[str]:
    """Return one sentence for each entrant that has tasks without a reward."""
    return [
        f"{result.entrant.name}: {missing:,} of {len(result.tasks):,} tasks {'has' if missing == 1 else 'have'} "
        "no reward; the mean reward leaves out such tasks."
        for result in report.entrants
        if (missing := result.unrewarded)
    ]


def _means_table(report: EvaluationReport) -> Table:
    """Return a row for each measure and entrant: the mean, and the difference to the first entrant."""
    rows = []
    for measure in report.measures:
        for position, result in enumerate(report.entrants):
            change = _signed(report.difference(position, measure)) if position else "baseline"
            rows.append((measure, _name_and_version(result), str(result.estimate(measure)), change))
    return ("measure", "entrant", "mean [95 % interval] over tasks", "difference"), rows


def _name_and_version(result: EntrantResult) -> str:
    """Return `support (support@12)`: an entrant's name, and what it stood for where that is another name."""
    name = result.entrant.name
    return f"{name} ({result.version})" if result.version and result.version != name else name


def _costs_table(report: EvaluationReport) -> Table:
    """Return a row for each entrant: its runs, their calls and tokens, and the time that they took."""
    rows = [
        {
            "entrant": result.entrant.name,
            "runs": f"{result.runs:,}",
            "failed": f"{result.failed:,}",
            "calls": f"{result.usage.calls:,}",
            "prompt tokens": f"{result.usage.prompt_tokens:,}",
            "sampled tokens": f"{result.usage.completion_tokens:,}",
            "s per call": _number(result.call_s),
            "s per run, p50": _number(result.quantile_s(0.5)),
            "s per run, p95": _number(result.quantile_s(0.95)),
            "s in all": _number(result.wall_s),
        }
        for result in report.entrants
    ]
    return tuple(rows[0]), [tuple(row.values()) for row in rows]


def _signed(estimate: Estimate) -> str:
    """Return a difference with its signs; a star follows if its interval does not contain 0."""
    if not estimate.count:
        return "no pairs"
    return estimate.text("+") + ("" if estimate.low <= 0 <= estimate.high else " *")


def _number(value: float | None) -> str:
    """Return a number of four digits; nothing for `None`."""
    return "" if value is None else f"{value:.4g}"
