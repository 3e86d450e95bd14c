"""`journeywork docs` writes the reference; the queries of the pages work."""

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
from pipeline.config.overrides import tables
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
    for number, command in enumerate(re.findall(r'journeywork sql [^"`\n]*"[^"\n]+"', page.read_text("utf-8")))
    if "…" not in command
]
QUESTIONS = (ROOT / "docs" / "questions.md").read_text("utf-8")
QUERIES = re.findall(r"```sql\n(.*?)```\n", QUESTIONS, re.S)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("docs") / "reference"
    docs.main([str(folder)])
    return {path.name: path.read_text("utf-8") for path in folder.iterdir()}


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        docs.main([str(tmp_path / "file")])
    assert ended.value.code == 2
    assert "journeywork docs: " in capsys.readouterr().err


def test_every_setting_has_a_row_with_its_meaning(pages: dict[str, str]) -> None:
    rows = [row for prefix, cls in tables(Config) for row in pipeline.docs.setting_rows(prefix, cls)]
    assert len(rows) > 200
    assert [name for name, _, _, meaning in rows if not meaning] == []
    assert [name for name, *_ in rows if f"| {name} | " not in pages["configuration.md"]] == []


def test_every_event_has_a_section_with_its_docstring_and_its_fields(pages: dict[str, str]) -> None:
    common = {column.name for column in schema.columns(events.Event)}
    for cls in events.EVENTS:
        section = pages["events.md"].split(f"\n## `{events.wire_name(cls)}`\n")[1].split("\n## ")[0]
        assert inspect.cleandoc(cls.__doc__ or "no docstring") in section
        own = {column.name for column in schema.columns(cls)} - common
        assert [name for name in own if f"| `{name}` |" not in section] == []


def test_every_stream_consumer_bucket_and_user_has_a_row(pages: dict[str, str]) -> None:
    specs = (*streams.STREAMS, *streams.CONSUMERS, *streams.buckets(), streams.FLEET, *users.USERS)
    assert [s.name for s in specs if not s.purpose or f"| `{s.name}` |" not in pages["streams.md"]] == []


def test_every_view_and_alarm_has_a_section_with_what_it_means(pages: dict[str, str]) -> None:
    columns = sql.view_columns()
    for view in VIEWS:
        section = pages["views.md"].split(f"\n## `{view.name}`\n")[1].split("\n## ")[0]
        assert view.purpose in section
        assert [name for name in columns[view.name] if f"`{name}`" not in section] == []
    for alarm in ALARMS:
        section = pages["alarms.md"].split(f"\n## {alarm.name}\n")[1].split("\n## ")[0]
        assert all(text in section for text in (alarm.meaning, alarm.action, docs.runnable(alarm)))


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
