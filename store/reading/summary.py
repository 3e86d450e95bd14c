"""A run in four sentences: its state, its gain on held-out tasks, its last step, and what to do."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.running.state import read_state
from store.alarms.table import ALARMS
from store.reading.history import History, Row
from store.reading.intervals import SAMPLE, finite, sample_of
from store.reading.texts import ago, number, signed, when

_LAST = """
    SELECT version, step, published_at FROM checkpoints WHERE model = $model AND branch = $branch
    ORDER BY step DESC LIMIT 1
"""
_EVALUATED = """
    SELECT e.entrant, e.pairs AS tasks, e.difference AS gain, e.difference_low AS low, e.difference_high AS high,
      b.entrant AS baseline
    FROM evaluations e JOIN evaluations b
      ON b.project = e.project AND b.evaluation = e.evaluation AND b.measure = e.measure AND b.position = 0
    WHERE e.measure = 'reward' AND e.model = $model AND e.kind = 'policy' AND e.difference IS NOT NULL
    ORDER BY e.evaluated_at DESC, e.position LIMIT 1
"""
_HELD_OUT = f"""
    WITH by_group AS (
      SELECT last_step AS step, group_id, avg(reward) AS "value" FROM rewards
      WHERE model = $model AND branch = $branch AND split = 'val' AND outcome = 'scored' AND first_step = last_step
      GROUP BY ALL
    )
    SELECT step, {SAMPLE} FROM by_group GROUP BY step HAVING count(*) > 1 ORDER BY step
"""  # noqa: S608
_ALARMS = "SELECT * FROM alarms WHERE cleared_at IS NULL ORDER BY since DESC, alarm, model, about"


def summary(history: History, selection: Row, now: datetime | None = None) -> dict[str, Any]:
    """Return the sentences about a model and branch.

    `state`: `running`, `stopped`, or `unknown` where no supervisor ran here; `sentences`: the state, the gain, the last
    step; `todo`: what to do; `alarms`: the raised ones; `gain`: the figures of the gain, or `None`."""
    run = read_state(Path(history.config.run_dir))
    state = "unknown" if run is None else "running" if run.running else "stopped"
    alarms, gain = alarms_of(history), gain_of(history, selection)
    last = next(iter(history.shared_rows(_LAST, selection)), None)
    moment = (now or datetime.now(UTC)).replace(tzinfo=None)
    services = run.services.items() if run else ()
    troubled = [f"{name} is {process.state}" for name, process in services if process.state != "ready"]
    raised = f" with {len(alarms)} alarm{'s' if len(alarms) > 1 else ''}" if alarms else ""
    sentences = [
        {
            "running": f"The run is running{raised}{': ' if troubled else ''}{', '.join(troubled)}.",
            "stopped": f"The run is stopped{raised}.",
            "unknown": f"No process of the run is known on this machine{raised and f'; it is {raised.strip()}'}.",
        }[state],
        _gain_text(gain),
        f"Step {last['step']} was published {ago((moment - last['published_at']).total_seconds())}, at "
        f"{when(last['published_at'])} UTC." if last else "No step was taken yet.",
    ]  # fmt: skip
    return {
        "state": state, "sentences": sentences, "todo": _todo(state, alarms, gain, last), "alarms": alarms,
        "gain": gain,
    }  # fmt: skip


def alarms_of(history: History) -> list[Row]:
    """Return the raised alarms, causes before consequences: the columns of the view `alarms` with `title`, `meaning`
    and `action` (what to do) of docs/alarms.md."""
    raised = history.rows(_ALARMS)
    return [
        {**row, "title": alarm.title, "meaning": alarm.meaning, "action": alarm.action}
        for alarm in ALARMS for row in raised if row["alarm"] == alarm.name
    ]  # fmt: skip


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
        "entrant": f"{selection['model']}@{last['step']}", "baseline": f"{selection['model']}@{first['step']}",
        "tasks": min(first["groups"], last["groups"]), "gain": last["mean"] - first["mean"], "low": low, "high": high,
    }  # fmt: skip


def _gain_text(gain: Row | None) -> str:
    if gain is None:
        return "Nothing was measured on held-out tasks."
    text = f"{gain['entrant']} scores {signed(gain['gain'])} against {gain['baseline']} "
    text += f"on {number(gain['tasks'])} held-out tasks"
    if gain["low"] is None:
        return f"{text}; there are too few for an interval."
    verdict = "better" if gain["low"] > 0 else "worse" if gain["high"] < 0 else "the difference may be chance"
    return f"{text} (95 % interval {signed(gain['low'])} to {signed(gain['high'])}: {verdict})."


def _todo(state: str, alarms: list[Row], gain: Row | None, last: Row | None) -> str:
    if alarms:
        return f"{alarms[0]['title']}: {alarms[0]['action']}"
    if gain and gain["high"] is not None and gain["high"] < 0:
        return "It got worse: read some of its groups below, and promote an older version (Decisions)."
    if last and gain is None:
        return "Measure it: `journeywork eval` plays held-out tasks with two versions."
    if state == "stopped":
        return "`journeywork up` with the same settings goes on with it."
    return "Nothing needs to be done." if last else "Send it work: a step needs groups whose rewards differ."
