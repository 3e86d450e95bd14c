"""What an apprentice is worth, in a sentence for each outside model: who answers, how well, and at what cost."""

from __future__ import annotations

from store.showing.pages.history import History, Row
from store.showing.pages.intervals import SAMPLE, sample_of
from store.showing.pages.texts import counted, number

_NEWEST = """
    WITH newest AS (
      SELECT *, opened_at > max(opened_at) OVER (PARTITION BY model) - INTERVAL 1 DAY AS late FROM takeovers
    )
    SELECT model, sum(calls) FILTER (late) AS calls, sum(apprentice_calls) FILTER (late) AS own,
      sum(cost_usd) FILTER (late) AS spent,
      count(*) FILTER (late) * avg(cost_usd) FILTER (side = 'master' AND calls > 0) AS full
    FROM newest GROUP BY model ORDER BY model
"""
_QUALITY = f"""
    WITH units AS (
      SELECT model, side, avg(reward) AS "value" FROM takeovers WHERE reward IS NOT NULL
      GROUP BY model, side, coalesce(nullif(group_id, ''), trajectory)
    )
    SELECT model, side, {SAMPLE} FROM units GROUP BY model, side
"""  # noqa: S608


def takeover_texts(history: History) -> list[str]:
    """Return a sentence for each outside model about which there is a decision."""
    quality = {(row["model"], row["side"]): row for row in history.shared_rows(_QUALITY, {})}
    return [
        _takeover_text(row, quality.get((row["model"], "apprentice")), quality.get((row["model"], "master")))
        for row in history.shared_rows(_NEWEST, {})
    ]


def _takeover_text(row: Row, apprentice: Row | None, master: Row | None) -> str:
    """Return the sentence about an outside model. `row`: of `_NEWEST`; the others: each side's row of `_QUALITY`."""
    share = row["own"] / row["calls"] if row["calls"] else 0.0
    text = (
        f"The apprentice of {row['model']} answered {share:.0%} of the {number(row['calls'])} calls of the newest day. "
    )
    text += f"Its runs score {_quality_text(apprentice)}, the master's {_quality_text(master)}. That day cost "
    text += _usd_text(row["spent"])
    return text + ("." if row["full"] is None else f"; by the master alone it would be {_usd_text(row['full'])}.")


def _usd_text(value: float) -> str:
    """Return an amount in USD: in cents from one dollar on, else with three significant digits."""
    return f"${value:,.2f}" if value >= 1 else f"${value:.3g}"


def _quality_text(row: Row | None) -> str:
    """Return the mean reward of a side with its 95 % interval and number of tasks."""
    if row is None:
        return "nothing yet"
    low, high = sample_of(row).interval()
    interval = f" [{low:.3f}, {high:.3f}]" if row["groups"] > 1 else ""
    return f"{row['mean']:.3f}{interval} on {counted(row['groups'], 'task')}"
