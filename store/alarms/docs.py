"""Generates docs/alarms.md from the table of alarms."""

from __future__ import annotations

from pipeline.config import Config
from store.alarms.reading import threshold
from store.alarms.table import ALARMS, PARAMETER, Alarm

_HEAD = """# Alarms

<!-- Generated from `store/alarms/table.py` by `python -m store.docs`: edit there. -->

The store service checks these conditions every `alarms.every_s` seconds. An alarm is raised when its condition is met,
and cleared when two checks in a row do not find it. Each change is one event (`policy.alarm`, in
[events.md](events.md)) and one post to `alarms.webhook`, if that is set. `journeywork status`, `journeywork watch` and
the dashboard show the raised alarms; `journeywork sql "FROM alarms ORDER BY since DESC"` lists all alarms.

The threshold of each alarm is a setting ([configuration.md](configuration.md)). Its query returns one row per model,
server, consumer or stream that meets the condition. You can run the queries below with `journeywork sql`; they contain
the default thresholds. Exceptions are `log_full` and `store_behind`: their tables `fills` and `unwritten` are filled by
the service from the log.

If several stores of one log run, all of them check, and an alarm is raised once: a store publishes a change only if no
other store has published one since it read the log. A store clears only alarms that it has found itself, or that were
raised before it started. Give all stores the same `[alarms]` and `vllm.urls`.

## The webhook

A post is a JSON document: `text` (one line), `id` (the same when a post is repeated), `state` (`raised` or `cleared`),
`alarm`, `title`, `project`, `run`, `model`, `about`, `value`, `threshold`, `detail`, `action`, `since` and `at`
(seconds since the Unix epoch). It contains names and figures only. A post that fails is repeated for
`alarms.webhook_retry_s`, except after a status of 400, 401, 403, 404 or 410. A receiver that is down delays only posts.
Do not write a secret in the URL into the settings; name an environment variable:
`alarms.webhook = "https://example.com/${HOOK}"`.
"""


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


def alarms_page() -> str:
    """Return the page."""
    parts = [_HEAD]
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
