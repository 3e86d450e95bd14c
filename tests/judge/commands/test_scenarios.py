"""`journeywork scenarios`: training tasks from a description."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from judge.commands import scenarios as command
from judge.commands.scenarios import (
    ScenarioError,
    generate,
    is_new,
    make_scenario,
    parse_batch,
    read_scenarios,
)
from pipeline.config import JudgeConfig
from tests.judge.kit import Model

pytestmark = pytest.mark.anyio


def writer() -> Model:
    """A model whose tasks never repeat."""
    number = itertools.count()

    def answer(request: dict[str, Any]) -> str:
        entries = [
            {"task": f"find w{(n := next(number))} x{n} y{n} z{n}", "difficulty": n % 7} for _ in range(4)
        ]
        return json.dumps({"scenarios": entries})

    return Model(answer)


async def test_batches_are_requested_until_there_are_enough_and_show_existing_tasks() -> None:
    model = writer()
    found = await generate(model, "A finder of things.", 10)
    assert len(found) == len({s.id for s in found}) == 10
    assert all(1 <= s.difficulty <= 5 for s in found)
    assert "A finder of things." in model.requests[0]["messages"][0]["content"]
    assert found[0].task in model.requests[1]["messages"][1]["content"]


async def test_a_model_without_new_tasks_ends_the_command_with_those_there_are() -> None:
    for reply in ('{"scenarios": [{"task": "always the same one", "difficulty": 1}]}', "no", 500):
        with pytest.raises(ScenarioError) as error:
            await generate(Model(lambda _, reply=reply: reply), "x", 3)  # type: ignore[misc]
        assert len(error.value.args[1]) <= 1


@pytest.mark.parametrize(
    "reply",
    [
        '{"scenarios": [{"task": "do a", "difficulty": 2}, {"task": "see b"}]}',
        'Here:\n```json\n[{"task": "do a", "difficulty": 2}, {"task": "see b", "difficulty": true}]\n```',
        '["do a", "see b", "", 7]',
    ],
)
def test_replies_are_read_whatever_their_form(reply: str) -> None:
    assert [s.task for s in parse_batch(reply)] == ["do a", "see b"]


def test_a_difficulty_is_kept_within_1_to_5() -> None:
    reply = '[{"task": "a", "difficulty": 2}, {"task": "b", "difficulty": 9}, {"task": "c"}]'
    assert [s.difficulty for s in parse_batch(reply)] == [2, 5, 3]


def test_near_duplicates_are_not_new() -> None:
    kept = [make_scenario("Book a table for two at eight tonight")]
    assert not is_new(make_scenario("book a table for two, at EIGHT tonight!"), kept)
    assert is_new(make_scenario("Cancel the booking"), kept)


def test_the_command_writes_and_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = writer()

    @asynccontextmanager
    async def make(config: JudgeConfig) -> AsyncIterator[Model]:
        yield model

    monkeypatch.setattr("judge.commands.scenarios.open_judge_model", make)
    (tmp_path / "task.md").write_text("Find things.")
    out = tmp_path / "s.jsonl"
    common = ["--describe", str(tmp_path / "task.md"), "--out", str(out), "--set", "judge.model=m"]
    command.main([*common, "--count", "3"])
    first = read_scenarios(out)
    with pytest.raises(SystemExit) as stop:
        command.main([*common, "--count", "6"])
    assert stop.value.code == 2
    command.main([*common, "--count", "6", "--append"])
    assert read_scenarios(out)[:3] == first
    assert len(read_scenarios(out)) == 6
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["scenarios"] == 6
    model.answer = lambda _: "no"
    with pytest.raises(SystemExit) as stop:
        command.main([*common, "--count", "9", "--append"])
    assert stop.value.code == 1
    assert len(read_scenarios(out)) == 6
