"""Tasks that a model writes for the tools of a server."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from journeywork.art import mcp
from tests.kits.scoring_server import Answer, ScoringServer


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


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ('{"scenarios": [{"task": "the same", "difficulty": 1}]}', "wrote 1 of 3 scenarios, then nothing new in 3 r"),
        ('{"scenarios": [{"task": "a", "difficulty": 9}]}', "wrote 0 of 3"),
        ('{"scenarios": [{"task": "a"}]}', "wrote 0 of 3"),
        ('["do a"]', "wrote 0 of 3"),
        (b"no JSON", "wrote 0 of 3"),
        (500, "500"),
    ],
)
async def test_a_model_without_new_tasks_is_an_error(reply: Answer | bytes, said: str) -> None:
    async with ScoringServer(lambda _: reply).run() as server:
        with pytest.raises(ValueError, match=said):
            await write(server, 3)


async def test_text_around_the_json_is_skipped_and_a_near_duplicate_is_not_new() -> None:
    replies = iter(
        [
            'So:\n```json\n{"scenarios": [{"task": " Book a table for two at eight tonight ", "difficulty": 2}]}\n```',
            '{"scenarios": [{"task": "book a table for two, at EIGHT tonight!", "difficulty": 1}, '
            '{"task": "Cancel the booking", "difficulty": 1}]}',
        ]
    )
    async with ScoringServer(lambda _: next(replies)).run() as server:
        written = await write(server, 2)
    assert [(s.task, s.difficulty) for s in written] == [
        ("Book a table for two at eight tonight", 2),
        ("Cancel the booking", 1),
    ]
