"""What a comparison of two versions compares, and what the history says of it.

The evidence is a function of the plan, of the two versions and of two times, so it can be computed again from the
store: runs that were opened since `since`, with what was known of them until `until`. Routing is by a hash of the run's
id, so a run has its side from its opening on.

Pairs follow the order of opening, over the runs before the first one of a side whose result is not known yet. So what a
run achieves, and how long that takes, has no influence on which runs are a pair. A run without a result at its deadline
is late: it counts against whatever would be decided, or with the value that the plan gives it.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import duckdb
import msgspec
from msgspec import Meta, Struct

from pipeline.errors import ConfigError
from pipeline.names import parse_version, split_point
from store.evidence.sequential import interval

Verdict = Literal["promote", "rollback", "hold", "continue"]

_RUNS = """
WITH judged AS (
  SELECT trajectory, arg_min(reward, scored_at) AS judged, epoch_us(min(scored_at)) AS since
  FROM rewards WHERE project = $project AND branch = 'main' AND outcome = 'scored' GROUP BY trajectory
), said AS (
  SELECT trajectory, name, arg_min(value, given_at) AS value, epoch_us(min(given_at)) AS since
  FROM signals WHERE project = $project AND kind = 'number' AND "call" < 0 AND contains($expressions, name)
  GROUP BY trajectory, name
), opened AS (
  SELECT *, epoch_us(opened_at) AS began, epoch_us(completed_at) AS ended, began + $deadline <= $until AS late,
    least(began + $deadline, $until) AS known_until
  FROM trajectories
  WHERE project = $project AND model = $model AND epoch_us(opened_at) > $since AND epoch_us(opened_at) <= $until
    AND trajectory NOT IN (SELECT trajectory FROM rollout_opened WHERE project = $project AND pinned <> '')
), runs AS (
  SELECT *, last_step AS step FROM opened WHERE ended <= known_until
), moments AS (
  SELECT trajectory, ended AS moment FROM runs
  UNION SELECT trajectory, greatest(ended, since) FROM judged JOIN runs USING (trajectory)
  UNION SELECT trajectory, greatest(ended, since) FROM said JOIN runs USING (trajectory)
), feedback_by AS (
  SELECT trajectory, moment, map(list(name ORDER BY name), list(value ORDER BY name)) AS feedback
  FROM moments JOIN said USING (trajectory) WHERE since <= moment GROUP BY trajectory, moment
), known AS (
  SELECT runs.*, moments.moment, judged, feedback FROM runs JOIN moments USING (trajectory)
  LEFT JOIN judged ON judged.trajectory = runs.trajectory AND since <= moment
  LEFT JOIN feedback_by ON feedback_by.trajectory = runs.trajectory AND feedback_by.moment = moments.moment
  WHERE moments.moment <= known_until
), numbers AS (SELECT trajectory, moment, exchanges, first_step, last_step, {columns} FROM known),
firsts AS (
  SELECT trajectory, any_value(CASE WHEN exchanges > 0 THEN [first_step, last_step] END) AS steps, {firsts}
  FROM numbers GROUP BY trajectory
)
SELECT trajectory, late, firsts.* EXCLUDE (trajectory) FROM opened LEFT JOIN firsts USING (trajectory)
ORDER BY began, trajectory
"""
"""Each run in the order of opening: whether its deadline has passed, the steps that answered it, and of each metric the
first number that was known by the deadline. What becomes known later changes nothing that an earlier look saw."""


class Metric(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number of each run, and the range that it is cut to."""

    sql: str
    """An expression over the columns of the view `trajectories`, and `judged` (the reward that training got) and
    `feedback` (by name, each written out): `reward`, `judged`, `feedback['stars']`, `metrics['won']`, `sampled_tokens`,
    `calls_s`. The first number that it is after the run's end is the run's value."""
    low: float = 0.0
    high: float = 1.0
    late: float | None = None
    """Value of a run that has none at its deadline. `None`: the end of the range that is worse for what would be
    decided."""

    def __post_init__(self) -> None:
        if not self.sql.strip():
            raise ConfigError("a metric has no expression: give SQL over a run, such as reward")
        if not -math.inf < self.low < self.high < math.inf:
            raise ConfigError(f"the range of {self.sql} is from {self.low:g} to {self.high:g}: low < high, both finite")
        if self.late is not None and not self.low <= self.late <= self.high:
            raise ConfigError(
                f"the value of late runs, {self.late:g}, is not within the range of {self.sql}, {self.low:g} to "
                f"{self.high:g}"
            )


class Guard(Metric, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number that the candidate may not make worse by more than `margin`."""

    worse: Literal["higher", "lower"] = "higher"
    margin: Annotated[float, Meta(ge=0, le=sys.float_info.max)] = 0.0


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is compared, and when it ends. It is recorded with the split that begins the comparison."""

    metric: Metric
    guards: tuple[Guard, ...] = ()
    alpha: Annotated[float, Meta(gt=0, lt=1)] = 0.05
    """Greatest probability that an interval ever misses the truth, of each metric."""
    deadline_s: Annotated[float, Meta(gt=0, le=1e9)] = 3600.0
    """Seconds from the opening of a run after which it is late if it has no value."""
    max_pairs: Annotated[int, Meta(ge=1)] = 5000
    """Pairs after which the control stays, if nothing was shown until then."""
    approval: bool = False
    """Whether a person has to agree to a promotion."""


class Finding(Struct, frozen=True, kw_only=True):
    """One metric: the candidate's mean less the control's, over `pairs` pairs. In the means and in `difference` a late
    run has the middle of the range, unless the plan gives it a value."""

    sql: str
    candidate_runs: int
    """Runs before the first one whose value is not known yet."""
    control_runs: int
    candidate_late: int = 0
    """Those of them that had no value at their deadline."""
    control_late: int = 0
    candidate_mean: float | None
    control_mean: float | None
    pairs: int
    difference: float | None
    low: float
    high: float


class Evidence(Struct, frozen=True, kw_only=True):
    """What a decision rests on. `candidate`, `control`: exact versions; `since`, `until`: microseconds of Unix time."""

    plan: Plan
    candidate: str
    control: str
    percent: float
    """Share of the runs that the candidate gets."""
    since: int
    until: int
    findings: tuple[Finding, ...] = ()
    """Of the metric, then of each guard."""
    verdict: Verdict = "continue"


def read_evidence(connection: duckdb.DuckDBPyConnection, project: str, begun: Evidence, until: int) -> Evidence:
    """Return what the history says at `until` of the comparison that began with `begun`, by its plan. Raises
    `ConfigError` for a metric that DuckDB can't compute."""
    plan, (model, step) = begun.plan, parse_version(begun.candidate)
    control = parse_version(begun.control)[1]
    metrics = (plan.metric, *plan.guards)
    columns = [f"nullif(CAST(({metric.sql}) AS DOUBLE), 'nan'::DOUBLE)" for metric in metrics]
    expressions = ", ".join(columns)
    named = ", ".join(metric.sql for metric in metrics)
    _check(connection, expressions, len(metrics), named)
    query = _RUNS.format(
        columns=", ".join(f"{column} AS n{i}" for i, column in enumerate(columns)),
        firsts=", ".join(f"arg_min(n{i}, moment) FILTER (n{i} IS NOT NULL) AS n{i}" for i in range(len(columns))),
    )
    values = {
        "project": project,
        "model": model,
        "since": begun.since,
        "until": until,
        "expressions": expressions,
        "deadline": round(plan.deadline_s * 1e6),
    }
    try:
        rows = connection.execute(query, values).fetchall()
    except duckdb.Error as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the metrics {named} can't be computed: {reason} {_columns(connection)}") from error
    sides: dict[int, list[tuple[Any, ...]]] = {step: [], control: []}
    for trajectory, late, steps, *numbers in rows:
        side = step if split_point(trajectory) < begun.percent else control
        if steps in (None, [side, side]):  # else its calls named another version, or came before the split
            sides[side].append((late, *numbers))
    findings = []
    for number, metric in enumerate(metrics, 1):
        candidates, controls = ([(run[0], run[number]) for run in sides[side]] for side in (step, control))
        findings.append(_compared(metric, candidates, controls, begun.percent, plan.alpha))
    evidence = msgspec.structs.replace(begun, until=until, findings=tuple(findings))
    return msgspec.structs.replace(evidence, verdict=verdict(plan, evidence.findings))


def _columns(connection: duckdb.DuckDBPyConnection) -> str:
    """A sentence that lists what a metric can be made of."""
    columns = ", ".join(connection.view("trajectories").columns)
    return (
        f"A run has {columns}, judged (the reward that training got), and by name metrics['…'], rewards['…'] and "
        "feedback['…']."
    )


def _check(connection: duckdb.DuckDBPyConnection, columns: str, count: int, named: str) -> None:
    """Raise `ConfigError` unless `columns` are `count` expressions over a run, for the metrics `named`. They
    come from an event, and run with the rights of the caller: a query within them could read any file, or send what it
    read elsewhere."""
    (text,) = connection.execute("SELECT json_serialize_sql(?)", [f"SELECT {columns}"]).fetchall()[0]
    parsed = msgspec.json.decode(text)
    statements = parsed.get("statements", ())
    node = statements[0]["node"] if len(statements) == 1 else {}
    if (
        node.get("type") != "SELECT_NODE"
        or node["from_table"]["type"] != "EMPTY"
        or len(node["select_list"]) != count
        or any(f'"class":"{kind}"' in text for kind in ("SUBQUERY", "WINDOW"))
    ):
        raise ConfigError(
            f"the metrics {named} can't be computed: each is one expression over a run, without a query or a window. "
            f"{parsed.get('error_message', '')}"
        )


Run = tuple[bool, float | None]
"""Whether a run's deadline has passed, and its value, if it is known."""
Bounds = tuple[float, float]
"""The least and the greatest value that a run may have."""


def _compared(
    metric: Metric, candidates: Sequence[Run], controls: Sequence[Run], percent: float, alpha: float
) -> Finding:
    """Compare the two sides pair by pair, in the order in which the runs were opened. Where one side gets more runs,
    the mean of several of its runs stands against one of the other."""
    candidate, control = _bounds(metric, candidates), _bounds(metric, controls)
    of_candidate = _means(candidate, max(round(percent / (100 - percent)), 1))
    of_control = _means(control, max(round((100 - percent) / percent), 1))
    width = metric.high - metric.low
    pairs = min(len(of_candidate), len(of_control))
    # Cut at both ends: means round.
    least = [min(max(c[0] - o[1], -width), width) for c, o in zip(of_candidate, of_control, strict=False)]
    greatest = [min(max(c[1] - o[0], -width), width) for c, o in zip(of_candidate, of_control, strict=False)]
    return Finding(
        sql=metric.sql,
        candidate_runs=len(candidate),
        control_runs=len(control),
        candidate_late=_late(candidates, candidate),
        control_late=_late(controls, control),
        candidate_mean=_middle(candidate),
        control_mean=_middle(control),
        pairs=pairs,
        difference=_middle(list(zip(least, greatest, strict=True))),
        low=interval(least, -width, width, alpha).low,
        high=interval(greatest, -width, width, alpha).high,
    )


def _bounds(metric: Metric, runs: Sequence[Run]) -> list[Bounds]:
    """Return the bounds of the runs before the first one whose value is not known yet."""
    late = (metric.low, metric.high) if metric.late is None else (metric.late, metric.late)
    known = itertools.takewhile(lambda run: run[0] or run[1] is not None, runs)
    return [late if value is None else (cut := min(max(value, metric.low), metric.high), cut) for _, value in known]


def _means(bounds: Sequence[Bounds], size: int) -> list[Bounds]:
    """Return the means of consecutive `size` bounds. What is left over at the end waits for more."""
    return [
        (_mean([least for least, _ in part]), _mean([greatest for _, greatest in part]))
        for part in (bounds[at : at + size] for at in range(0, len(bounds) - size + 1, size))
    ]


def _middle(bounds: Sequence[Bounds]) -> float | None:
    return _mean([(least + greatest) / 2 for least, greatest in bounds]) if bounds else None


def _late(runs: Sequence[Run], bounds: Sequence[Bounds]) -> int:
    return sum(value is None for _, value in runs[: len(bounds)])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def verdict(plan: Plan, findings: tuple[Finding, ...]) -> Verdict:
    """Return what the plan makes of the findings: `promote` if the metric is shown to be better and each guard shown to
    be harmless; `rollback` if the metric is shown to be worse, or a guard to be broken; `hold` at the plan's end."""
    metric, guards = findings[0], findings[1:]
    harms = [
        (f.low - g.margin, f.high - g.margin) if g.worse == "higher" else (-f.high - g.margin, -f.low - g.margin)
        for g, f in zip(plan.guards, guards, strict=True)
    ]
    if metric.high < 0 or any(least > 0 for least, _ in harms):
        return "rollback"
    if metric.low > 0 and all(most <= 0 for _, most in harms):
        return "promote"
    return "hold" if metric.pairs >= plan.max_pairs else "continue"
