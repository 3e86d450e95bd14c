"""What a comparison of two versions compares, and what the history says of it.

The evidence is a function of the plan, of the two versions and of two times, so it can be computed again from the
store: runs that were opened since `since`, with what was known of them until `until`. Routing is by a hash of the run's
id, so a run has its side from its opening on.

Pairs follow the order of opening, over the runs before the first one of a side whose result is not known yet. So what a
run achieves, and how long that takes, has no influence on which runs are a pair. A run without a result at its deadline
is late: it counts against whatever would be decided, or with the value that the plan gives it.

An apprentice takes over from an outside model in steps: its share rises while the comparison goes on. One interval
covers the pairs of all shares, one share after the other; those of a share count once every run of the share before is
known or late. Each pair has the same mean difference whatever the share, and whether a pair of a share comes about is
settled before any of its results is known. So the pairs are one sequence as `sequential` asks for, and its one error
holds over all looks and all steps: no part of it is spent on a step.

A share `s` is given once `s` times the difference is shown to lie above `-margin`: by what the apprentice does to its
share, it makes the mean of all runs worse by less than the margin. For the last step, all runs, that is
non-inferiority; before, less is asked for, and so fewer pairs.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Any, Literal, NamedTuple

import duckdb
import msgspec
from msgspec import Meta, Struct

from pipeline.errors import ConfigError
from pipeline.names import is_outside, outside_model, parse_version, split_point
from store.evidence.sequential import interval

Verdict = Literal["promote", "raise", "rollback", "hold", "continue"]

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
  FROM trajectories LEFT JOIN (
    SELECT trajectory, asked, pinned FROM rollout_opened WHERE project = $project AND (asked <> '' OR pinned <> '')
  ) USING (trajectory)
  WHERE project = $project AND epoch_us(opened_at) > $since AND epoch_us(opened_at) <= $until
    AND CASE WHEN $outside THEN asked = $model ELSE model = $model AND pinned IS NULL END
  QUALIFY NOT $outside
    OR row_number() OVER (PARTITION BY coalesce(nullif(group_id, ''), trajectory) ORDER BY began, trajectory) = 1
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
SELECT trajectory, began, pinned, late, firsts.* EXCLUDE (trajectory) FROM opened LEFT JOIN firsts USING (trajectory)
ORDER BY began, trajectory
"""
"""Each run in the order of opening: when that was, the version that a decision about an outside model gave it, whether
its deadline has passed, the steps that answered it, and of each metric the first number that was known by the deadline.
What becomes known later changes nothing that an earlier look saw. Runs of a group have one side, and are no independent
results: under an outside model's name the first of them counts."""


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


class Cascade(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which answers of an apprentice are shown: those whose mean logprob is not below `min_logprob`. It was chosen by
    `pairs` answers of apprentice and master to one call. Of these the apprentice's is shown in `shown` pairs, and in
    `agreed` of them the two agree."""

    min_logprob: Annotated[float, Meta(le=0)]
    quality: float
    """Least probability that a shown answer agrees, with an error of at most `alpha`."""
    alpha: float
    pairs: int
    shown: int
    agreed: int


class Guard(Metric, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number that the candidate may not make worse by more than `margin`."""

    worse: Literal["higher", "lower"] = "higher"
    margin: Annotated[float, Meta(ge=0, le=sys.float_info.max)] = 0.0


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is compared, and when it ends. It is recorded with the split that begins the comparison."""

    metric: Metric
    margin: Annotated[float, Meta(ge=0, le=sys.float_info.max)] = 0.0
    """By how much the metric's mean may be worse, over all runs. 0: it has to be shown to be better."""
    steps: tuple[Annotated[float, Meta(gt=0, lt=100)], ...] = ()
    """Shares of the candidate, rising, in percent: the first at the beginning, each further one by evidence."""
    cascade: Cascade | None = None
    """Which answers of the candidate are shown. `None`: all."""
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


class Share(Struct, frozen=True, kw_only=True):
    """Of the runs that were opened after `since` (microseconds of Unix time), the candidate gets `percent`."""

    percent: float
    since: int = 0


class Evidence(Struct, frozen=True, kw_only=True):
    """What a decision rests on. `candidate`, `control`: exact versions; `until`: microseconds of Unix time."""

    plan: Plan
    candidate: str
    control: str
    """An exact version, or `outside:<name>`."""
    shares: tuple[Share, ...]
    """The shares that the candidate had, one after the other."""
    until: int = 0
    findings: tuple[Finding, ...] = ()
    """Of the metric, then of each guard."""
    verdict: Verdict = "continue"

    @property
    def model(self) -> str:
        """The name whose runs are compared."""
        return outside_model(self.control) if is_outside(self.control) else parse_version(self.control)[0]

    def next_percent(self) -> float:
        """Return the share that comes next: 100 after the plan's last step."""
        return next((step for step in self.plan.steps if step > self.shares[-1].percent), 100.0)


def read_evidence(connection: duckdb.DuckDBPyConnection, project: str, begun: Evidence, until: int) -> Evidence:
    """Return what the history says at `until` of the comparison that began with `begun`, by its plan. Raises
    `ConfigError` for a metric that DuckDB can't compute."""
    plan = begun.plan
    metrics = (plan.metric, *plan.guards)
    sides: list[dict[str, list[tuple[Any, ...]]]] = [{begun.candidate: [], begun.control: []} for _ in begun.shares]
    for trajectory, opened, pinned, late, steps, *numbers in _read_runs(connection, project, begun, until, metrics):
        at = sum(opened > share.since for share in begun.shares) - 1
        side = _side_of(begun, begun.shares[at], trajectory, pinned, steps)
        if side in sides[at]:
            sides[at][side].append((late, *numbers))
    findings = []
    for number, metric in enumerate(metrics, 1):
        parts = [
            Part(share.percent, *([(run[0], run[number]) for run in runs] for runs in of_share.values()))
            for share, of_share in zip(begun.shares, sides, strict=True)
        ]
        findings.append(_compare_pairs(metric, parts, plan.alpha))
    evidence = msgspec.structs.replace(begun, until=until, findings=tuple(findings))
    return msgspec.structs.replace(evidence, verdict=verdict(evidence))


def _read_runs(
    connection: duckdb.DuckDBPyConnection, project: str, begun: Evidence, until: int, metrics: Sequence[Metric]
) -> list[tuple[Any, ...]]:
    """Return the rows of `_RUNS` for the comparison `begun`, as they were at `until`: of each run its id, time of
    opening, pinned version, whether its deadline has passed, its steps, and a number of each metric. Raises
    `ConfigError`."""
    columns = [f"nullif(CAST(({metric.sql}) AS DOUBLE), 'nan'::DOUBLE)" for metric in metrics]
    expressions = ", ".join(columns)
    named = ", ".join(metric.sql for metric in metrics)
    _check_expressions(connection, expressions, len(metrics), named)
    query = _RUNS.format(
        columns=", ".join(f"{column} AS n{i}" for i, column in enumerate(columns)),
        firsts=", ".join(f"arg_min(n{i}, moment) FILTER (n{i} IS NOT NULL) AS n{i}" for i in range(len(columns))),
    )
    values = {
        "project": project,
        "model": begun.model,
        "outside": is_outside(begun.control),
        "since": begun.shares[0].since,
        "until": until,
        "expressions": expressions,
        "deadline": round(begun.plan.deadline_s * 1e6),
    }
    try:
        return connection.execute(query, values).fetchall()
    except duckdb.Error as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the metrics {named} can't be computed: {reason} {_columns_text(connection)}") from error


def _side_of(begun: Evidence, share: Share, trajectory: str, pinned: str | None, steps: list[int] | None) -> str:
    """Return the version (candidate or control) whose result a run is; empty if other versions answered its calls,
    because they named one or came before the split. `pinned`: the version that a decision about an outside model gave
    the run; `steps`: the first and the last step of the policy that answered it, `None` without a call."""
    if is_outside(begun.control):
        return pinned or begun.control
    side = begun.candidate if split_point(trajectory) < share.percent else begun.control
    return side if steps in (None, [parse_version(side)[1]] * 2) else ""


def _columns_text(connection: duckdb.DuckDBPyConnection) -> str:
    """Return a sentence that lists what a metric can be made of."""
    columns = ", ".join(connection.view("trajectories").columns)
    return (
        f"A run has {columns}, judged (the reward that training got), and by name metrics['…'], rewards['…'] and "
        "feedback['…']."
    )


def _check_expressions(connection: duckdb.DuckDBPyConnection, columns: str, count: int, named: str) -> None:
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


class Part(NamedTuple):
    """The runs of one share, in the order of opening."""

    percent: float
    candidates: Sequence[Run]
    controls: Sequence[Run]


def _compare_pairs(metric: Metric, parts: Sequence[Part], alpha: float) -> Finding:
    """Compare the two sides of all shares pair by pair, in the order in which the runs were opened. Where one side gets
    more runs, a pair is the mean of several of its runs and one run of the other."""
    candidate, control = list[Bounds](), list[Bounds]()
    candidate_late = control_late = 0
    least, greatest = list[float](), list[float]()  # of each pair, the ends of its difference
    width = metric.high - metric.low
    for percent, candidates, controls in parts:
        of_candidate, of_control = _bounds(metric, candidates), _bounds(metric, controls)
        candidate += of_candidate
        control += of_control
        candidate_late += _count_late(candidates, of_candidate)
        control_late += _count_late(controls, of_control)
        ours = _means(of_candidate, max(round(percent / (100 - percent)), 1))
        theirs = _means(of_control, max(round((100 - percent) / percent), 1))
        for (our_least, our_greatest), (their_least, their_greatest) in zip(ours, theirs, strict=False):
            # Cut at both ends: means round.
            least.append(min(max(our_least - their_greatest, -width), width))
            greatest.append(min(max(our_greatest - their_least, -width), width))
        if (len(of_candidate), len(of_control)) != (len(candidates), len(controls)):
            break  # the pairs of the next share come after all of this one
    return Finding(
        sql=metric.sql,
        candidate_runs=len(candidate),
        control_runs=len(control),
        candidate_late=candidate_late,
        control_late=control_late,
        candidate_mean=_mean_of_middles(candidate),
        control_mean=_mean_of_middles(control),
        pairs=len(least),
        difference=_mean_of_middles(list(zip(least, greatest, strict=True))),
        low=interval(least, -width, width, alpha).low,
        high=interval(greatest, -width, width, alpha).high,
    )


def _bounds(metric: Metric, runs: Sequence[Run]) -> list[Bounds]:
    """Return the bounds of each run before the first one that has no value and is not late. Both are the run's value,
    cut to the metric's range; of a late run without a value, they are `metric.late`, or the ends of
    the range if that is `None`."""
    late = (metric.low, metric.high) if metric.late is None else (metric.late, metric.late)
    known = itertools.takewhile(lambda run: run[0] or run[1] is not None, runs)
    return [late if value is None else (cut := min(max(value, metric.low), metric.high), cut) for _, value in known]


def _means(bounds: Sequence[Bounds], size: int) -> list[Bounds]:
    """Return the means of every `size` consecutive bounds. Fewer than that at the end are left out, until more runs are
    known."""
    return [
        (fmean([least for least, _ in part]), fmean([greatest for _, greatest in part]))
        for part in (bounds[at : at + size] for at in range(0, len(bounds) - size + 1, size))
    ]


def _mean_of_middles(bounds: Sequence[Bounds]) -> float | None:
    """Return the mean of the middles of bounds; `None` if there are none."""
    return fmean([(least + greatest) / 2 for least, greatest in bounds]) if bounds else None


def _count_late(runs: Sequence[Run], bounds: Sequence[Bounds]) -> int:
    """Return how many of the runs that `bounds` were made of, the first ones, had no value at their deadline."""
    return sum(value is None for _, value in runs[: len(bounds)])


def verdict(evidence: Evidence) -> Verdict:
    """Return what the plan makes of the findings: `promote` if the metric is shown to be better, or to be worse by less
    than the plan's margin, and each guard shown to be harmless; `raise` if that is shown of the next share; `rollback`
    if the metric is shown to be worse, and not by less than the margin, or a guard to be broken; `hold` at the plan's
    end."""
    plan, (metric, *guards) = evidence.plan, evidence.findings
    share = evidence.next_percent() / 100
    harms = [
        (f.low - g.margin, f.high - g.margin) if g.worse == "higher" else (-f.high - g.margin, -f.low - g.margin)
        for g, f in zip(plan.guards, guards, strict=True)
    ]
    if (metric.high < 0 and metric.low <= -plan.margin) or any(least > 0 for least, _ in harms):
        return "rollback"
    # Of a guard, what is beyond its margin at all runs may be within it at a part of them.
    scaled = [g.margin * (1 / share - 1) for g in plan.guards]
    if metric.low > -plan.margin / share and all(h[1] <= more for h, more in zip(harms, scaled, strict=True)):
        return "promote" if share == 1 else "raise"
    return "hold" if metric.pairs >= plan.max_pairs else "continue"
