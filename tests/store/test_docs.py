"""docs/store.md describes the views; the ten queries of docs/questions.md work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from store import docs
from store.reading import sql

COMMANDS = [
    pytest.param(shlex.split(command)[2:], id=f"{page.name}-{number}")
    for page in (docs.FOLDER.parent / "README.md", *sorted(docs.FOLDER.glob("*.md")))
    for number, command in enumerate(
        re.findall(r'journeywork sql [^"`\n]*"[^"\n]+"', page.read_text("utf-8"))
    )
    if "…" not in command
]
QUESTIONS = (docs.FOLDER / "questions.md").read_text("utf-8")
QUERIES = re.findall(r"```sql\n(.*?)```\n\n```text\n", QUESTIONS, re.S)


@pytest.mark.parametrize("name", docs.SECTIONS)
def test_a_page_says_what_the_code_says(name: str) -> None:
    assert docs.current_page(name) == (docs.FOLDER / name).read_text("utf-8"), "run `python -m store.docs`"


def test_a_page_without_the_comments_around_its_section_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs, "FOLDER", tmp_path)
    (tmp_path / "store.md").write_text("nothing")
    with pytest.raises(ValueError, match="comments"):
        docs.current_page("store.md")


def test_there_are_ten_questions_with_answers() -> None:
    assert QUESTIONS.count("## ") == 10
    assert len(QUERIES) == 11  # the first is answered by held-out tasks and by the training groups
    assert "```text\n```" not in QUESTIONS


def test_each_question_can_be_asked(connection: duckdb.DuckDBPyConnection) -> None:
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
