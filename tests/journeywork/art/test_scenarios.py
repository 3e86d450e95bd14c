"""Tasks that a model writes for the tools of a server."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from journeywork.art import mcp
from journeywork.art.mcp.generate_scenarios import is_new, parse_scenarios
from tests.kits.scoring_server import Answer, ScoringServer

pytestmark = pytest.mark.anyio


def inventive() -> Callable[[dict[str, Any]], Answer]:
    """Answers whose tasks never repeat."""
    words = iter(itertools.permutations(("letter", "invoice", "weather", "recipe", "train"), 3))

    def answer(_: dict[str, Any]) -> str:
        tasks = [" ".join(next(words)) for _ in range(4)]
        return json.dumps({"scenarios": [{"task": t, "difficulty": 1 + len(t) % 5} for t in tasks]})

    return answer


async def write(server: ScoringServer, count: int) -> mcp.GeneratedScenarioCollection:
    tools = [{"name": "finder", "description": "A finder of things."}]
    return await mcp.generate_scenarios(
        tools, num_scenarios=count, generator_model="m", generator_api_key="k", generator_base_url=server.url
    )


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
        with pytest.raises(ValueError, match=r"then nothing new in 3 replies|500"):
            await write(server, 3)


def completion(text: str) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"message": {"content": text}}]})


def test_text_around_the_json_is_skipped_and_another_form_is_not_read() -> None:
    reply = 'Here:\n```json\n{"scenarios": [{"task": " do a ", "difficulty": 2}]}\n```'
    assert [(s.task, s.difficulty) for s in parse_scenarios(completion(reply))] == [("do a", 2)]
    for wrong in ('["do a"]', '{"scenarios": [{"task": "a", "difficulty": 9}]}', '{"scenarios": [{"task": "a"}]}'):
        assert parse_scenarios(completion(wrong)) == []
    assert parse_scenarios(httpx.Response(200, text="no JSON")) == []


def test_near_duplicates_are_not_new() -> None:
    existing = [mcp.GeneratedScenario("Book a table for two at eight tonight", 1)]
    assert not is_new(mcp.GeneratedScenario("book a table for two, at EIGHT tonight!", 1), existing)
    assert is_new(mcp.GeneratedScenario("Cancel the booking", 1), existing)
