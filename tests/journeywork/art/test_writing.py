"""Tasks that a model writes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from journeywork.art.mcp.types import GeneratedScenario
from journeywork.art.mcp.writing import ScenarioError, Writer, is_new, parse_scenarios, write_scenarios
from tests.kits.scoring_server import Answer, ScoringServer

pytestmark = pytest.mark.anyio


def inventive() -> Callable[[dict[str, Any]], Answer]:
    """Answers whose tasks never repeat."""
    number = itertools.count()

    def answer(_: dict[str, Any]) -> str:
        tasks = [f"find w{(n := next(number))} x{n} y{n} z{n}" for _ in range(4)]
        return json.dumps({"scenarios": [{"task": t, "difficulty": 1 + len(t) % 5} for t in tasks]})

    return answer


async def write(server: ScoringServer, count: int) -> list[GeneratedScenario]:
    return await write_scenarios(Writer("m", server.url, "k"), "A finder of things.", count)


async def test_batches_are_requested_until_there_are_enough_and_show_existing_tasks() -> None:
    async with ScoringServer(inventive(), keep=True).run() as server:
        written = await write(server, 10)
    assert len(written) == len({s.task for s in written}) == 10
    assert "A finder of things." in server.requests[0]["messages"][0]["content"]
    assert written[0].task in server.requests[1]["messages"][1]["content"]
    assert server.headers[0]["authorization"] == "Bearer k"


@pytest.mark.parametrize("reply", ['{"scenarios": [{"task": "the same", "difficulty": 1}]}', "no", 500])
async def test_a_model_without_new_tasks_is_an_error(reply: Answer) -> None:
    async with ScoringServer(lambda _: reply).run() as server:
        with pytest.raises(ScenarioError):
            await write(server, 3)


def test_text_around_the_json_is_skipped_and_another_form_is_not_read() -> None:
    reply = 'Here:\n```json\n{"scenarios": [{"task": " do a ", "difficulty": 2}]}\n```'
    assert [(s.task, s.difficulty) for s in parse_scenarios(reply)] == [("do a", 2)]
    for wrong in ('["do a"]', '{"scenarios": [{"task": "a", "difficulty": 9}]}', '{"scenarios": [{"task": "a"}]}'):
        assert parse_scenarios(wrong) == []


def test_near_duplicates_are_not_new() -> None:
    existing = [GeneratedScenario("Book a table for two at eight tonight", 1)]
    assert not is_new(GeneratedScenario("book a table for two, at EIGHT tonight!", 1), existing)
    assert is_new(GeneratedScenario("Cancel the booking", 1), existing)
