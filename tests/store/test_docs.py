"""docs/store.md describes the views; the ten queries of docs/questions.md work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from store import docs
from store.reading import sql
from tests.store.kit import fill, run_of_one_step

COMMANDS = [
    pytest.param(shlex.split(command)[2:], id=f"{page.name}-{number}")
    for page in (docs.FOLDER.parent / "README.md", *sorted(docs.FOLDER.glob("*.md")))
    for number, command in enumerate(
        re.findall(r'journeywork sql [^"`\n]*"[^"\n]+"', page.read_text("utf-8"))
    )
    if "…" not in command
]
QUESTIONS = (docs.FOLDER / "questions.md").read_text("utf-8")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a history of one step."""
    folder = tmp_path_factory.mktemp("run")
    fill(folder, run_of_one_step())
    return folder


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
    assert (
        len(docs.queries(QUESTIONS)) == 11
    )  # the first is answered by held-out tasks and by the training groups
    assert "```text\n```" not in QUESTIONS


def test_each_question_can_be_asked(run_dir: Path) -> None:
    with sql.connect(run_dir) as connection:
        answers = [connection.sql(query).fetchall() for query in docs.queries(QUESTIONS)]
    assert [bool(rows) for rows in answers] == [False] + [True] * 10  # this run has no held-out tasks


def test_the_commands_of_the_pages_are_found() -> None:
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("arguments", COMMANDS)
def test_each_command_of_the_pages_works(
    arguments: list[str],
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    status = sql.main([*arguments, "--run-dir", str(run_dir)])
    assert (status, capfdbinary.readouterr().err) == (0, b"")


def test_answers_are_put_below_their_questions(run_dir: Path) -> None:
    page = "# t\n\n```sql\nSELECT count(*) AS n FROM exchanges\n```\n\n```text\nold\n```\nend\n"
    with sql.connect(run_dir) as connection:
        once = docs.answered(page, connection)
        assert "│     4 │" in once
        assert docs.answered(once, connection) == once
