"""A run in sentences: its training reward, its state, its gain on held-out tasks, its last step, and what to do."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from journeywork.statistics import Sample, finite
from pipeline.events import PolicyPromoted, standing_decisions
from pipeline.running.state import read_state
from pipeline.statistics.progress import reward_text
from pipeline.statistics.utilization import bound_by
from store.alarms.table import ALARMS
from store.showing.pages.history import History, Row
from store.showing.pages.intervals import SAMPLE, sample_of
from store.showing.pages.takeover import takeover_texts
from store.showing.pages.texts import ago, counted, number, signed, when

_LAST = """
    SELECT version, step, published_at FROM checkpoints WHERE model = $model AND branch = $branch
    ORDER BY step DESC LIMIT 1
"""
_EVALUATED = """
    SELECT e.entrant, e.pairs AS tasks, e.difference AS gain, e.difference_low AS low, e.difference_high AS high,
      b.entrant AS baseline
    FROM evaluations e JOIN evaluations b USING (project, evaluation, measure)
    WHERE b.position = 0 AND measure = 'reward' AND e.model = $model AND e.kind = 'policy' AND e.difference IS NOT NULL
    ORDER BY e.evaluated_at DESC, e.position LIMIT 1
"""
_HELD_OUT = f"""
    WITH runs AS (
      SELECT last_step AS step, group_id, trajectory, reward,
        count(DISTINCT group_id) OVER (PARTITION BY step) AS groups
      FROM rewards
      WHERE model = $model AND branch = $branch AND split = 'val' AND outcome = 'scored' AND first_step = last_step
    ), units AS (
      SELECT step, avg(reward) AS "value" FROM runs
      GROUP BY step, CASE WHEN groups > 1 THEN group_id ELSE trajectory END
    )
    SELECT step, {SAMPLE} FROM units GROUP BY step ORDER BY step
"""  # noqa: S608
"""A version whose held-out runs form a single group is measured by its runs."""
_PROGRESS = "SELECT * FROM progress WHERE model = $model AND branch = $branch"
_DECISIONS = """
    SELECT action, version, other FROM policy_promoted WHERE model = $model ORDER BY "at", log_seq
"""
_UTILIZATION = """
    SELECT sum(seconds) AS seconds, sum(sampling * seconds) / sum(seconds) AS sampling,
      sum(training * seconds) / sum(seconds) AS training, count(*) AS steps
    FROM (FROM utilization WHERE model = $model ORDER BY step DESC LIMIT 10)
"""
"""Who waits for whom in the newest steps."""
_NEWEST_USE = """
    SELECT
      EXISTS (FROM adapters WHERE model = $model AND version = $version AND loaded_at IS NOT NULL) AS loaded,
      EXISTS (FROM evaluations WHERE model = $model AND version = $version)
        OR EXISTS (FROM rewards WHERE model = $model AND split = 'val' AND last_step = $step) AS measured
"""
_WAITING = """
    SELECT count(*) AS runs, count(DISTINCT group_id) AS groups, max(completed_at) AS newest FROM waiting
    WHERE model = $model
"""
_ALARMS = "SELECT * FROM alarms WHERE cleared_at IS NULL ORDER BY since DESC, alarm, model, about"


def summary(history: History, selection: Row, now: datetime | None = None) -> dict[str, Any]:
    """Return the sentences about a model and branch.

    `state`: `running`, `stopped`, or `unknown` where no supervisor ran here; `sentences`: what apprentices are worth,
    whether the training reward moved, the state, the gain, the last step, what bounds the speed, the runs that wait;
    `todo`: what to do; `alarms`: the raised ones; `gain`: the figures of the gain, or `None`; `waiting`: the columns
    `runs`, `groups` and `newest` of the runs that wait to be scored, and `until`, when the last one's wait for feedback
    ends (`None`: it waits for members)."""
    run = read_state(Path(history.config.run_dir))
    state = "unknown" if run is None else "running" if run.running else "stopped"
    alarms, gain = alarms_of(history), gain_of(history, selection)
    last = next(iter(history.shared_rows(_LAST, selection)), None)
    moment = (now or datetime.now(UTC)).replace(tzinfo=None)
    waiting = _waiting(history, selection, moment)
    services = run.services.items() if run else ()
    troubled = [f"{name} is {process.state}" for name, process in services if process.state != "ready"]
    raised = f" with {counted(len(alarms), 'alarm')}" if alarms else ""
    sentences = [
        *takeover_texts(history),
        reward_text_of(history, selection),
        {
            "running": f"The run is running{raised}{': ' if troubled else ''}{', '.join(troubled)}.",
            "stopped": f"The run is stopped{raised}.",
            "unknown": f"No process of the run is known on this machine{raised and f'; it is {raised.strip()}'}.",
        }[state],
        _gain_text(gain),
        f"Step {last['step']} was published {ago((moment - last['published_at']).total_seconds())}, at "
        f"{when(last['published_at'])} UTC."
        if last
        else "No step was taken yet.",
        *utilization_texts(history, selection),
        *([_waiting_text(waiting)] if waiting["runs"] else []),
    ]
    if alarms:
        detail = f"{alarms[0]['detail']}. " if alarms[0]["detail"] else ""
        todo = f"{alarms[0]['title']}: {detail}{alarms[0]['action']}"
    else:
        unused = _unused(history, selection, last) if last and gain else ""
        todo = unused or _todo(state, gain, last, waiting)
    return {"state": state, "sentences": sentences, "todo": todo, "alarms": alarms, "gain": gain, "waiting": waiting}


def alarms_of(history: History) -> list[Row]:
    """Return the raised alarms, causes before consequences: the columns of the view `alarms` with `title`, `meaning`
    and `action` (what to do) of its alarm."""
    raised = history.rows(_ALARMS)
    return [
        {**row, "title": alarm.title, "meaning": alarm.meaning, "action": alarm.action}
        for alarm in ALARMS
        for row in raised
        if row["alarm"] == alarm.name
    ]


def gain_of(history: History, selection: Row) -> Row | None:
    """Return by how much the policy is better on held-out tasks than before, with the 95 % interval: from the newest
    evaluation, else from the held-out runs of the first and the last version that have some. `None` without either."""
    if evaluated := history.shared_rows(_EVALUATED, selection):
        return evaluated[0]
    rows = history.shared_rows(_HELD_OUT, selection)
    if len(rows) < 2:
        return None
    first, last = rows[0], rows[-1]
    low, high = map(finite, sample_of(last).difference(sample_of(first)))
    return {
        "entrant": f"{selection['model']}@{last['step']}",
        "baseline": f"{selection['model']}@{first['step']}",
        "tasks": min(first["groups"], last["groups"]),
        "gain": last["mean"] - first["mean"],
        "low": low,
        "high": high,
    }


def _gain_text(gain: Row | None) -> str:
    """Return the sentence about the gain on held-out tasks, of which `gain_of` returns the figures."""
    if gain is None:
        return "Nothing was measured on held-out tasks."
    text = f"{gain['entrant']} scores {signed(gain['gain'])} against {gain['baseline']} "
    text += f"on {number(gain['tasks'])} held-out tasks"
    if gain["low"] is None:
        return f"{text}; there are too few for an interval."
    verdict = "better" if gain["low"] > 0 else "worse" if gain["high"] < 0 else "the difference may be chance"
    return f"{text} (95 % interval {signed(gain['low'])} to {signed(gain['high'])}: {verdict})."


def reward_text_of(history: History, selection: Row) -> str:
    """Return whether the training reward of a model and branch moved."""
    rows = history.shared_rows(_PROGRESS, selection)
    if not rows:
        return "No training reward yet."
    ends = [
        Sample(*(rows[0][f"{end}_{column}"] for column in ("groups", "mean", "variance", "least", "greatest")))
        for end in ("first", "last")
    ]
    return reward_text(rows[0]["last_step"] - rows[0]["first_step"], *ends)


def utilization_texts(history: History, selection: Row) -> list[str]:
    """Return what bounds the speed of branch `main`, if two steps were taken."""
    (row,) = history.shared_rows(_UTILIZATION, selection)
    if selection["branch"] != "main" or not row["steps"]:
        return []
    return [
        f"Bound by {bound_by(row['sampling'], row['training'])}: in the last {number(row['steps'])} steps, servers "
        f"answered calls for {row['sampling']:.0%} of the time and the trainer trained for {row['training']:.0%}."
    ]


def _waiting(history: History, selection: Row, moment: datetime) -> Row:
    """Return the counts of the runs that wait to be scored, and `until`: when the newest one's wait for feedback ends,
    or `None` if that is over by `moment`."""
    row = history.shared_rows(_WAITING, selection)[0]
    wait_s = history.config.feedback.wait_s
    until = row["newest"] + timedelta(seconds=wait_s) if row["runs"] and wait_s else None
    return {**row, "until": until if until and until > moment else None}


def _waiting_text(waiting: Row) -> str:
    """Return the sentence about the runs that wait to be scored, of which `_waiting` returns the counts."""
    runs = f"{waiting['runs']:,} run{'s wait' if waiting['runs'] > 1 else ' waits'}"
    if waiting["until"]:
        return f"{runs} for feedback until {when(waiting['until'])} UTC."
    return f"{runs} to be scored: for the other runs of a group, or for the judge."


def _unused(history: History, selection: Row, last: Row) -> str:
    """Return what to do with the newest version, if it is neither served nor measured; empty otherwise."""
    about = {**selection, "version": last["version"], "step": last["step"]}
    use = history.shared_rows(_NEWEST_USE, about)[0]
    standing = standing_decisions(
        PolicyPromoted(project="", model=selection["model"], **row)
        for row in history.shared_rows(_DECISIONS, selection)
    )
    decision = standing[-1] if standing and standing[-1].version else None
    served = last["version"] in (decision.version, decision.other) if decision else use["loaded"]
    if served or use["measured"] or selection["branch"] != "main":
        return ""
    why = f"{decision.version} is, by a decision" if decision else "no inference server has loaded it"
    return f"{last['version']}, the newest version, is neither served ({why}) nor measured: " + (
        f"`journeywork eval {decision.version} {last['version']}` compares the two."
        if decision
        else "`logs/sampler.log` says why it is not loaded."
    )


def _todo(state: str, gain: Row | None, last: Row | None, waiting: Row) -> str:
    """Return what to do next. `gain`: that on held-out tasks; `last`: the newest step; `waiting`: the runs that wait
    to be scored."""
    if gain and gain["high"] is not None and gain["high"] < 0:
        return "It got worse: read some of its groups below, and promote an older version (Decisions)."
    if last and gain is None:
        return "Measure it: `journeywork eval` plays held-out tasks with two versions."
    if state == "stopped":
        return "`journeywork up` with the same settings goes on with it."
    if last or waiting["runs"]:
        return "Nothing needs to be done."
    return "Send it work: a step needs groups whose rewards differ."
