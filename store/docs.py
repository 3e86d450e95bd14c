"""`journeywork docs FOLDER` writes the reference pages, which are made of the code: settings, events, streams, views of
the history, alarms."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pipeline.docs
from pipeline.config import Config
from pipeline.docs import GENERATED, table
from pipeline.terminal.parsers import command_parser, exit_on_error
from store.alarms.table import ALARMS, Alarm, threshold
from store.reading import sql
from store.reading.views import VIEWS


def views_page() -> str:
    """Return every view with its columns, as Markdown."""
    parts = [
        "# Views of the history\n",
        GENERATED.format(source="`store/reading/views/`"),
        "Query them with `journeywork sql` (docs/store.md). Below the views there is one table per event tag, such as "
        "`rollout_exchange`, with every column of the page events.md. The end of a name is its unit: `…_at` is a time "
        "in UTC, `…_s` are seconds, `…_usd` a price, `…_tokens` numbers of tokens.\n",
    ]
    columns = sql.view_columns()
    for view in VIEWS:
        rows = ((f"`{name}`", meaning) for name, meaning in columns[view.name].items())
        parts.append(f"## `{view.name}`\n\n{view.purpose}\n\n{table('column|meaning', rows)}")
    return "\n".join(parts)


def runnable(alarm: Alarm) -> str:
    """Return the alarm's query for `journeywork sql`: with the default values of its parameters, and with the servers
    of the view `adapters` in place of the table `replicas`, which only the service has. A query over its tables
    `fills` or `unwritten` can't be run there."""
    settings = Config().alarms
    values = {
        "threshold": f"{threshold(Config(), alarm):g}",
        "now": "make_timestamp(epoch_us(now()))",
        "steps": str(settings.steps),
        "groups": str(settings.groups),
        "window_s": f"{settings.window_s:g}",
        "outside": "[]",
    }
    text = sql.PARAMETER.sub(lambda match: values[match[1]], alarm.sql)
    replicas = "(SELECT DISTINCT replica FROM adapters WHERE replica IS NOT NULL)"
    return text.replace("CROSS JOIN replicas r", f"CROSS JOIN {replicas} r")


def alarms_page() -> str:
    """Return the table of the alarms and a section for each, as Markdown."""
    parts = [
        "# Alarms\n",
        GENERATED.format(source="`store/alarms/table.py`"),
        "docs/operations.md says how alarms are raised and where to look first. A query returns one row per model, "
        "server, consumer or stream that meets the condition. Run it with `journeywork sql`; it has the default "
        "threshold. Exceptions are queries over `fills`, `unwritten` and `damaged`, which only the service "
        "has.\n",
        table(
            "alarm|title|threshold|default",
            ((f"[`{a.name}`](#{a.name})", a.title, f"`{a.setting}`", f"{threshold(Config(), a):g}") for a in ALARMS),
        ),
    ]
    parts += [
        f"## {alarm.name}\n\n{alarm.meaning}\n\n**Action.** {alarm.action}\n\n"
        f"Threshold: `{alarm.setting}`.\n\n```sql\n{runnable(alarm)}\n```\n"
        for alarm in ALARMS
    ]
    return "\n".join(parts)


PAGES: dict[str, Callable[[], str]] = {**pipeline.docs.PAGES, "views.md": views_page, "alarms.md": alarms_page}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the pages into the given folder."""
    parser = command_parser("docs", "Write the reference: settings, events, streams, views, alarms.")
    parser.add_argument("folder", type=Path, help="is created if it does not exist")
    folder = parser.parse_args(argv).folder
    with exit_on_error("docs", (OSError,)):
        folder.mkdir(parents=True, exist_ok=True)
        for name, render in PAGES.items():
            (folder / name).write_text(render(), "utf-8")
    sys.stdout.write(f"{folder}: {', '.join(PAGES)}\n")


if __name__ == "__main__":
    main()
