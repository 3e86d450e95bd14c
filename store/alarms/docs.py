"""Generates the sections of docs/alarms.md from the table of alarms."""

from __future__ import annotations

from pipeline.config import Config
from store.alarms.reading import threshold
from store.alarms.table import ALARMS, PARAMETER, Alarm


def runnable(alarm: Alarm) -> str:
    """Return the alarm's query with the default values of its parameters."""
    settings = Config().alarms
    values = {
        "threshold": f"{threshold(Config(), alarm):g}",
        "now": "make_timestamp(epoch_us(now()))",
        "steps": str(settings.steps),
        "groups": str(settings.groups),
        "window_s": f"{settings.window_s:g}",
    }
    text = PARAMETER.sub(lambda match: values[match[1]], alarm.sql)
    replicas = "(SELECT DISTINCT replica FROM adapters WHERE replica IS NOT NULL)"
    return text.replace("CROSS JOIN replicas r", f"CROSS JOIN {replicas} r")


def alarms_section() -> str:
    """Return the table of the alarms and a section for each, as Markdown."""
    parts = []
    rows = "\n".join(
        f"| [`{a.name}`](#{a.name}) | {a.title} | `{a.setting}` | {threshold(Config(), a):g} |"
        for a in ALARMS
    )
    parts.append(
        f"## The alarms\n\n| alarm | title | threshold | default |\n| --- | --- | --- | --- |\n{rows}\n"
    )
    parts += [
        f"## {alarm.name}\n\n{alarm.meaning}\n\n**Action.** {alarm.action}\n\n"
        f"Threshold: `{alarm.setting}`.\n\n```sql\n{runnable(alarm)}\n```\n"
        for alarm in ALARMS
    ]
    return "\n".join(parts)
