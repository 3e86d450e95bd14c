"""`journeywork scenarios`: training tasks from a description."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from journeywork import scenarios as command
from journeywork.command_line import INTERRUPTED
from journeywork.scenarios import (
    Scenario,
    ScenarioError,
    Writer,
    is_new,
    make_scenario,
    parse_scenarios,
    read_scenarios,
    write_scenarios,
)
from tests.kits.scoring_server import Answer, ScoringServer

pytestmark = pytest.mark.anyio


def inventive() -> Callable[[dict[str, Any]], Answer]:
    """Answers whose tasks never repeat."""
    number = itertools.count()

    def answer(_: dict[str, Any]) -> str:
        tasks = [f"find w{(n := next(number))} x{n} y{n} z{n}" for _ in range(4)]
        return json.dumps({"scenarios": [{"task": t, "difficulty": 1 + len(t) % 5} for t in tasks]})

    return answer


async def write(server: ScoringServer, count: int, existing: list[Scenario] | None = None) -> list[Scenario]:
    return await write_scenarios(Writer("m", server.url, "k"), "A finder of things.", count, existing or [])


async def test_batches_are_requested_until_there_are_enough_and_show_existing_tasks() -> None:
    async with ScoringServer(inventive(), keep=True).run() as server:
        written = await write(server, 10)
    assert len(written) == len({s.id for s in written}) == 10
    assert "A finder of things." in server.requests[0]["messages"][0]["content"]
    assert written[0].task in server.requests[1]["messages"][1]["content"]
    assert server.headers[0]["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("reply", "written"), [('{"scenarios": [{"task": "the same", "difficulty": 1}]}', [1]), ("no", []), (500, [])]
)
async def test_a_model_without_new_tasks_is_an_error_and_those_there_are_were_kept(
    reply: Answer, written: list[int]
) -> None:
    kept: list[int] = []
    async with ScoringServer(lambda _: reply).run() as server:
        with pytest.raises(ScenarioError):
            await write_scenarios(Writer("m", server.url, "k"), "A finder.", 3, (), lambda s: kept.append(len(s)))
    assert kept == written


def test_text_around_the_json_is_skipped_and_another_form_is_not_read() -> None:
    reply = 'Here:\n```json\n{"scenarios": [{"task": " do a ", "difficulty": 2}]}\n```'
    assert [(s.task, s.difficulty) for s in parse_scenarios(reply)] == [("do a", 2)]
    for wrong in ('["do a"]', '{"scenarios": [{"task": "a", "difficulty": 9}]}', '{"scenarios": [{"task": "a"}]}'):
        assert parse_scenarios(wrong) == []


def test_near_duplicates_are_not_new() -> None:
    existing = [make_scenario("Book a table for two at eight tonight", 1)]
    assert not is_new(make_scenario("book a table for two, at EIGHT tonight!", 1), existing)
    assert is_new(make_scenario("Cancel the booking", 1), existing)


def test_the_command_writes_and_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "task.md").write_text("Find things.")
    out = tmp_path / "s.jsonl"
    written = [make_scenario(f"task {n} of\u2028{n}", 1) for n in range(6)]

    async def write(writer: Writer, _: str, count: int, existing: list[Scenario], keep: Any) -> None:
        assert (writer, existing) == (Writer("m", "http://x", "secret"), written[: len(existing)])
        keep(written[:count])
        if count > 6:
            raise ScenarioError("out of ideas")

    monkeypatch.setattr(command, "write_scenarios", write)
    common = ["--describe", str(tmp_path / "task.md"), "--out", str(out), "--model", "m", "--api-base", "http://x"]

    def status(*more: str) -> int:
        try:
            command.main([*common, *more])
        except SystemExit as stop:
            return int(str(stop.code))
        return 0

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert status("--count", "3") == 2
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert [status("--count", "3"), status("--count", "6"), status("--count", "6", "--append")] == [0, 2, 0]
    assert read_scenarios(out) == written
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"out": str(out), "scenarios": 6}
    assert status("--count", "9", "--append") == 1
    assert len(read_scenarios(out)) == 6


def test_an_interrupted_command_leaves_what_was_written_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was written at the end only: Ctrl-C lost every reply that was paid for."""
    (tmp_path / "task.md").write_text("Find things.")
    out, replies = tmp_path / "s.jsonl", inventive()
    asked = 0

    async def ask(writer: Writer, messages: list[dict[str, str]]) -> str:
        nonlocal asked
        if (asked := asked + 1) == 3:
            raise KeyboardInterrupt
        return str(replies({}))

    monkeypatch.setattr(command, "_ask", ask)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    arguments = ["--describe", str(tmp_path / "task.md"), "--out", str(out), "--model", "m", "--count", "14"]
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == INTERRUPTED
    before = read_scenarios(out)
    assert len(before) == 8
    command.main([*arguments, "--append"])
    after = read_scenarios(out)
    assert (after[:8], len(after), asked) == (before, 14, 5)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["s.jsonl", "task.md"]
