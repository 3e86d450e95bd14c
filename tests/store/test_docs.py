"""`journeywork docs` writes the reference; the queries of the pages work."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

import pipeline.docs
from pipeline import events, streams
from pipeline.config import Config
from pipeline.events import schema
from pipeline.security import users
from store import docs
from store.alarms.table import ALARMS
from store.reading import sql
from store.reading.views import VIEWS

ROOT = Path(docs.__file__).parents[1]
COMMANDS = [
    pytest.param(shlex.split(command)[2:], id=f"{page.name}-{number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, command in enumerate(
        re.findall(r'journeywork sql [^"`\n]*"[^"\n]+"', page.read_text("utf-8"))
    )
    if "…" not in command
]
QUESTIONS = (ROOT / "docs" / "questions.md").read_text("utf-8")
QUERIES = re.findall(r"```sql\n(.*?)```\n", QUESTIONS, re.S)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("docs") / "reference"
    docs.main([str(folder)])
    return {path.name: path.read_text("utf-8") for path in folder.iterdir()}


def test_the_command_writes_its_pages(pages: dict[str, str]) -> None:
    assert pages.keys() == docs.PAGES.keys()


def test_a_folder_that_cannot_be_made_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        docs.main([str(tmp_path / "file")])
    assert ended.value.code == 2
    assert "journeywork docs: " in capsys.readouterr().err


def test_every_setting_has_a_row_with_its_meaning(pages: dict[str, str]) -> None:
    rows = [
        row
        for prefix, section in pipeline.docs.sections(Config)
        for row in pipeline.docs.setting_rows(prefix, section)
    ]
    assert len(rows) > 200
    for name, _, _, meaning in rows:
        assert meaning, f"{name} has no docstring"
        assert f"| {name} | " in pages["configuration.md"]


def test_every_event_has_a_section_with_its_docstring_and_its_fields(pages: dict[str, str]) -> None:
    common = {column.name for column in schema.columns(events.Event)}
    for cls in events.EVENTS:
        _, head, rest = pages["events.md"].partition(f"\n## `{events.wire_name(cls)}`\n")
        section = rest.partition("\n## ")[0]
        assert head
        assert cls.__doc__
        assert inspect.cleandoc(cls.__doc__) in section
        assert [
            c.name for c in schema.columns(cls) if c.name not in common and f"| `{c.name}` |" not in section
        ] == []


def test_every_stream_consumer_bucket_and_user_has_a_row(pages: dict[str, str]) -> None:
    specs = (*streams.STREAMS, *streams.CONSUMERS, *streams.buckets(), *streams.KEY_VALUES, *users.USERS)
    assert [spec.name for spec in specs if f"| `{spec.name}` |" not in pages["streams.md"]] == []
    assert all(spec.purpose for spec in specs)


def test_every_view_has_a_section_with_its_columns(pages: dict[str, str]) -> None:
    common, *_ = pages["views.md"].split("\n## ")
    columns = sql.view_columns()
    for view in VIEWS:
        section = pages["views.md"].split(f"\n## `{view.name}`\n")[1].split("\n## ")[0]
        assert view.purpose in section
        for name, meaning in columns[view.name].items():
            row = pipeline.docs.table("column|meaning", [(f"`{name}`", meaning)]).splitlines()[-1]
            assert row in section or (row in common and f"`{name}`" in section)


def test_every_alarm_has_a_section_with_its_meaning_action_and_query(pages: dict[str, str]) -> None:
    for alarm in ALARMS:
        section = pages["alarms.md"].split(f"\n## {alarm.name}\n")[1].split("\n## ")[0]
        assert alarm.meaning in section
        assert alarm.action in section
        assert docs.runnable(alarm) in section


def test_each_question_can_be_asked(connection: duckdb.DuckDBPyConnection) -> None:
    assert QUESTIONS.count("## ") == 10
    assert len(QUERIES) == 11  # the first is answered by held-out tasks and by the training groups
    answers = [connection.sql(query).fetchall() for query in QUERIES]
    assert [bool(rows) for rows in answers] == [False] + [True] * 10  # this run has no held-out tasks


def test_the_commands_of_the_pages_are_found() -> None:
    assert len(COMMANDS) > 10


@pytest.fixture(scope="module")
def connection(history: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    with sql.connect(history) as opened:
        yield opened


@pytest.mark.parametrize("arguments", COMMANDS)
def test_each_command_of_the_pages_works(
    arguments: list[str],
    history: Path,
    connection: duckdb.DuckDBPyConnection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    monkeypatch.setattr(sql, "connect", lambda *_: connection.cursor())
    status = sql.main([*arguments, "--run-dir", str(history)])
    assert (status, capfdbinary.readouterr().err) == (0, b"")
