"""The report of an evaluation: a Markdown page, and a table for a terminal. The dashboard draws the same figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from journeywork.evaluation.results import EntrantResult, EvaluationReport
from journeywork.statistics import Estimate

_MOVED = 10
"""Tasks that the report names on either side: those whose value rose or fell most."""
_ERRORS = 5

Table = tuple[tuple[str, ...], Sequence[tuple[str, ...]]]


def markdown_page(report: EvaluationReport) -> str:
    """Return the report in Markdown. A star marks an interval that does not contain 0."""
    parts = [f"# Evaluation {report.id}", _summary(report)]
    for title, text, table in _sections(report):
        parts += [f"## {title}", text] if text else [f"## {title}"]
        parts.append(_markdown_table(table))
    return "\n\n".join(parts) + "\n"


def text_table(report: EvaluationReport) -> str:
    """Return the means and differences for a terminal."""
    head, rows = _means(report)
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)
    ]
    return "\n".join([*(line.rstrip() for line in lines), *unrewarded(report)])


def unrewarded(report: EvaluationReport) -> list[str]:
    """Return one sentence for each entrant that has tasks without a reward."""
    return [
        f"{result.entrant.name}: {missing:,} of {len(result.tasks):,} tasks {'has' if missing == 1 else 'have'} "
        "no reward; the mean reward leaves out such tasks."
        for result in report.entrants
        if (missing := result.unrewarded)
    ]


def _summary(report: EvaluationReport) -> str:
    settings = report.settings
    return (
        f"{settings.get('tasks', 0):,} tasks of {report.scenarios or 'a list'}, "
        f"{settings.get('attempts', 1)} attempts each, played by {report.rollout or 'a function'}; "
        f"begun {report.began}. Intervals are 95 %; a star marks one that does not contain 0. Differences are to "
        + " ".join([f"{report.entrants[0].entrant.name}, paired by task.", *unrewarded(report)])
    )


def _sections(report: EvaluationReport) -> list[tuple[str, str, Table]]:
    sections = [("Results", "", _means(report)), ("Cost and latency", _cost_note(report), _costs(report))]
    for position in range(1, len(report.entrants)):
        name = report.entrants[position].entrant.name
        title = f"Tasks: {report.entrants[0].entrant.name} to {name}"
        sections.append(
            (
                title,
                f"The {_MOVED} tasks that rose most, and the {_MOVED} that fell most.",
                _moved(report, position),
            )
        )
    errors = [
        (result.entrant.name, str(result.errors.count(error)), error)
        for result in report.entrants
        for error in list(dict.fromkeys(result.errors))[:_ERRORS]
    ]
    if errors:
        sections.append(("Failed runs", "", (("entrant", "runs", "error"), errors)))
    return sections


def _means(report: EvaluationReport) -> Table:
    rows = []
    for measure in report.measures:
        for position, result in enumerate(report.entrants):
            change = _signed(report.difference(position, measure)) if position else "baseline"
            rows.append((measure, _shown(result), _interval(result.estimate(measure)), change))
    return ("measure", "entrant", "mean [95 % interval] over tasks", "difference"), rows


def _shown(result: EntrantResult) -> str:
    name = result.entrant.name
    return f"{name} ({result.version})" if result.version and result.version != name else name


def _costs(report: EvaluationReport) -> Table:
    head = ("entrant", "runs", "failed", "calls", "prompt tokens", "sampled tokens", "s per call", "s per run, p50",
            "s per run, p95", "s in all", "cost, USD")  # fmt: skip
    rows = [
        (
            result.entrant.name, f"{result.runs:,}", f"{result.failed:,}", f"{result.usage.calls:,}",
            f"{result.usage.prompt_tokens:,}", f"{result.usage.completion_tokens:,}", _number(result.call_s),
            _number(result.quantile_s(0.5)), _number(result.quantile_s(0.95)), _number(result.wall_s),
            _number(result.usage.cost_usd, "unknown"),
        )
        for result in report.entrants
    ]  # fmt: skip
    return head, rows


def _cost_note(report: EvaluationReport) -> str:
    if any(result.usage.cost_usd is None for result in report.entrants):
        return (
            "A cost is unknown without --price, or --usd-per-hour for the machine that serves the policies."
        )
    return ""


def _moved(report: EvaluationReport, position: int) -> Table:
    measure = report.measures[0] if report.measures else ""
    pairs = sorted(report.pairs(position, measure), key=lambda pair: pair[1] - pair[2])
    rose = [pair for pair in pairs[:_MOVED] if pair[2] > pair[1]]
    fell = [pair for pair in pairs[::-1][:_MOVED] if pair[2] < pair[1]]
    rows = [(task, f"{a:.3g}", f"{b:.3g}", f"{b - a:+.3g}") for task, a, b in (*rose, *fell)]
    return ("task", f"{measure} before", f"{measure} after", "difference"), rows


def _interval(estimate: Estimate) -> str:
    if not estimate.count:
        return "no value"
    return f"{estimate.mean:.3f} [{_end(estimate.low)}, {_end(estimate.high)}] over {estimate.count:,}"


def _signed(estimate: Estimate) -> str:
    if not estimate.count:
        return "no pairs"
    sure = "" if estimate.low <= 0 <= estimate.high else " *"
    return f"{estimate.mean:+.3f} [{_end(estimate.low, '+')}, {_end(estimate.high, '+')}] over {estimate.count:,}{sure}"


def _end(value: float, sign: str = "") -> str:
    return f"{value:{sign}.3f}" if math.isfinite(value) else "?"


def _number(value: float | None, missing: str = "") -> str:
    return missing if value is None else f"{value:.4g}"


def _markdown_table(table: Table) -> str:
    head, rows = table
    if not rows:
        return "None."
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(_markdown_cell(cell) for cell in line) + " |" for line in lines)


def _markdown_cell(text: str) -> str:
    plain = " ".join(text.split())
    for mark in "\\|`*_<>":
        plain = plain.replace(mark, f"\\{mark}")
    return plain
