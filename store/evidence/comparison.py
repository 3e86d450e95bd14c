"""What a comparison of two versions compares, and what the history says of it.

The evidence is a function of the plan, of the two versions and of two times, so it can be computed again from the
store: runs that were opened since `since`, with what was known of them until `until`. Routing is by a hash of the run's
id, so which version a run gets depends on nothing else.
"""

from __future__ import annotations

import math
import sys
from typing import Annotated, Literal

import duckdb
import msgspec
from msgspec import Meta, Struct

from pipeline.errors import ConfigError
from pipeline.names import parse_version
from pipeline.sequential import interval

Verdict = Literal["promote", "rollback", "hold", "continue"]

_RUNS = """
WITH judged AS (
  SELECT trajectory, arg_min(reward, scored_at) AS judged, epoch_us(min(scored_at)) AS since
  FROM rewards WHERE project = $project AND branch = 'main' AND outcome = 'scored' GROUP BY trajectory
), said AS (
  SELECT trajectory, name, arg_min(value, given_at) AS value, epoch_us(min(given_at)) AS since
  FROM signals WHERE project = $project AND kind = 'number' AND "call" < 0 AND contains($expressions, name)
  GROUP BY trajectory, name
), runs AS (
  SELECT *, last_step AS step, epoch_us(completed_at) AS ended FROM trajectories
  WHERE project = $project AND model = $model AND outcome <> 'open' AND exchanges > 0 AND first_step = last_step
    AND last_step IN ($candidate, $control) AND epoch_us(opened_at) > $since AND trajectory NOT IN (
      SELECT trajectory FROM rollout_opened WHERE project = $project AND pinned <> ''
    )
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
  WHERE moments.moment <= $until
), numbers AS (SELECT trajectory, step, moment, {columns} FROM known)
SELECT step, trajectory, {firsts} FROM numbers GROUP BY trajectory, step
"""
"""Of each run and metric, the first moment at which the metric is a number by what was known then, and that number.
What is said later changes neither, so it can't change what was seen at an earlier look, nor which runs are a pair."""


class Metric(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number of each run, and the range that it is cut to."""

    sql: str
    """An expression over the columns of the view `trajectories`, and `judged` (the reward that training got) and
    `feedback` (by name, each written out): `reward`, `judged`, `feedback['stars']`, `metrics['won']`, `sampled_tokens`,
    `calls_s`. A run counts once it is not null, with the number that it is then."""
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not self.sql.strip():
            raise ConfigError("a metric has no expression: give SQL over a run, such as reward")
        if not -math.inf < self.low < self.high < math.inf:
            raise ConfigError(
                f"the range of {self.sql} is from {self.low:g} to {self.high:g}: low < high, both finite"
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
    max_pairs: Annotated[int, Meta(ge=1)] = 5000
    """Pairs after which the control stays, if nothing was shown until then."""
    approval: bool = False
    """Whether a person has to agree to a promotion."""


class Finding(Struct, frozen=True, kw_only=True):
    """One metric: the candidate's mean less the control's, over `pairs` pairs."""

    sql: str
    candidate_runs: int
    control_runs: int
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


def gather(connection: duckdb.DuckDBPyConnection, project: str, begun: Evidence, until: int) -> Evidence:
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
        firsts=", ".join(
            f"min(moment) FILTER (n{i} IS NOT NULL), arg_min(n{i}, moment)" for i in range(len(columns))
        ),
    )
    values = {
        "project": project, "model": model, "since": begun.since, "until": until, "candidate": step,
        "control": control, "expressions": expressions,
    }  # fmt: skip
    try:
        rows = connection.execute(query, values).fetchall()
    except duckdb.Error as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"the metrics {named} can't be computed: {reason} {_columns(connection)}"
        ) from error
    findings = []
    for number, metric in enumerate(metrics):
        at = 2 + 2 * number
        counted = sorted((r[at], r[1], r[0], r[at + 1]) for r in rows if r[at] is not None)
        candidates, controls = (
            [min(max(value, metric.low), metric.high) for _, _, of_step, value in counted if of_step == side]
            for side in (step, control)
        )
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
        or any(word in text for word in ('"SUBQUERY"', '"WINDOW"'))
    ):
        raise ConfigError(
            f"the metrics {named} can't be computed: each is one expression over a run, without a query or a window. "
            f"{parsed.get('error_message', '')}"
        )


def _compared(
    metric: Metric, candidate: list[float], control: list[float], percent: float, alpha: float
) -> Finding:
    """Compare the two sides pair by pair, in the order in which the runs became known. Where one side gets more runs,
    the mean of several of its runs stands against one of the other."""
    per_candidate, per_control = (
        max(round(percent / (100 - percent)), 1),
        max(round((100 - percent) / percent), 1),
    )
    pairs = min(len(candidate) // per_candidate, len(control) // per_control)
    differences = [
        _mean(candidate[i * per_candidate : (i + 1) * per_candidate])
        - _mean(control[i * per_control : (i + 1) * per_control])
        for i in range(pairs)
    ]
    width = metric.high - metric.low
    estimate = interval([min(max(d, -width), width) for d in differences], -width, width, alpha)
    return Finding(
        sql=metric.sql, candidate_runs=len(candidate), control_runs=len(control),
        candidate_mean=_mean(candidate) if candidate else None, control_mean=_mean(control) if control else None,
        pairs=pairs, difference=estimate.mean if pairs else None, low=estimate.low, high=estimate.high,
    )  # fmt: skip


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def verdict(plan: Plan, findings: tuple[Finding, ...]) -> Verdict:
    """Return what the plan makes of the findings: `promote` if the metric is shown to be better and each guard shown to
    be harmless; `rollback` if the metric is shown to be worse, or a guard to be broken; `hold` at the plan's end."""
    metric, guards = findings[0], findings[1:]
    harms = [
        (f.low - g.margin, f.high - g.margin)
        if g.worse == "higher"
        else (-f.high - g.margin, -f.low - g.margin)
        for g, f in zip(plan.guards, guards, strict=True)
    ]
    if metric.high < 0 or any(least > 0 for least, _ in harms):
        return "rollback"
    if metric.low > 0 and all(most <= 0 for _, most in harms):
        return "promote"
    return "hold" if metric.pairs >= plan.max_pairs else "continue"
