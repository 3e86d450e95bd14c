"""docs/alarms.md, from the table of alarms."""

from __future__ import annotations

from pipeline.config import Config
from store.alarms.reading import threshold
from store.alarms.table import ALARMS, PARAMETER, Alarm

_HEAD = """# Alarms

<!-- Generated from `store/alarms/table.py` by `python -m store.docs`: edit there. -->

The store service checks eleven conditions every `alarms.every_s` seconds. When one begins to hold and when it ends,
there is one event each (`policy.alarm`, in [events.md](events.md)) and one post to `alarms.webhook`, if that is set. An
alarm ends when two checks in a row do not find it. `journeyman status`, `journeyman watch` and the dashboard show the
alarms that hold; `journeyman sql "FROM alarms ORDER BY since DESC"` lists them all.

The threshold of each is a setting ([configuration.md](configuration.md)). Its query returns a row for each thing that
the alarm holds for. `journeyman sql` takes the queries below, which are written with the defaults, as they are. The
exceptions are `log_full` and `store_behind`: their tables `fills` and `unwritten` hold what the service asks the log
for.

Several stores of one log all check, and an alarm is raised once: each publishes a change only if no other has published
one since it read the log. A store ends an alarm that it has found itself, or that was raised before it started. Give
all stores the same `[alarms]` and `vllm.urls`.

## The webhook

A post is a JSON document: `text` (one line), `id` (the same when a post is repeated), `state` (`raised` or `cleared`),
`alarm`, `title`, `project`, `run`, `model`, `about`, `value`, `threshold`, `detail`, `action`, `since` and `at`
(seconds since the Unix epoch). It holds names and figures only. A post that fails is repeated for
`alarms.webhook_retry_s`; after a status of 400, 401, 403, 404 or 410 it is not. A receiver that is down delays nothing
but posts. Keep a secret in the URL out of the settings: `alarms.webhook = "https://example.com/${HOOK}"`.
"""


def runnable(alarm: Alarm) -> str:
    """The alarm's query with the defaults of its parameters."""
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
    """The whole page."""
    parts = [_HEAD]
    rows = "\n".join(
        f"| [`{a.name}`](#{a.name}) | {a.title} | `{a.setting}` | {threshold(Config(), a):g} |"
        for a in ALARMS
    )
    parts.append(
        f"## The eleven\n\n| alarm | title | threshold | default |\n| --- | --- | --- | --- |\n{rows}\n"
    )
    parts += [
        f"## {alarm.name}\n\n{alarm.meaning}\n\n**What to do.** {alarm.action}\n\n"
        f"Threshold: `{alarm.setting}`.\n\n```sql\n{runnable(alarm)}\n```\n"
        for alarm in ALARMS
    ]
    return "\n".join(parts)
