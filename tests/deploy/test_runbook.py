"""The runbook of docs/operations.md has every alarm, and what it says to run can be run."""

import re
from pathlib import Path

import pytest

from pipeline.commands.main import OWN, SUBCOMMANDS
from store.alarms.table import ALARMS
from store.reading import sql
from tests.deploy.kit import ROOT
from tests.store.conftest import history as history

PAGE = (ROOT / "docs" / "operations.md").read_text("utf-8")
RUNBOOK = PAGE.split("## When an alarm comes\n")[1].split("\n## ")[0]
ROWS = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| (.*) \|$", RUNBOOK, re.MULTILINE))


def test_every_alarm_has_a_row() -> None:
    assert set(ROWS) == {alarm.name for alarm in ALARMS}


def test_the_commands_exist() -> None:
    commands = re.findall(r"(?:`|-- )journeywork ([a-z-]+)", RUNBOOK)
    assert {"status", "sql", "dead", "replay", "policy"} <= set(commands)
    assert set(commands) <= {*OWN, *SUBCOMMANDS}


@pytest.mark.parametrize("name", ROWS)
def test_what_a_row_queries_is_in_the_views(name: str, history: Path) -> None:
    for query in re.findall("`(SELECT[^`]+)`", ROWS[name]):
        with sql.connect(history) as connection:
            connection.sql(query).fetchall()


def test_the_names_of_metrics_are_the_trainer_s() -> None:
    """A map gives NULL for a name that it does not have."""
    source = "".join(p.read_text("utf-8") for p in (ROOT / "trainer").rglob("*.py"))
    for metric in set(re.findall(r"metrics\['(\w+)'\]", RUNBOOK)):
        assert re.search(rf'"{metric}"|\b{metric}=', source), metric
