"""Held-out games that are played together, with a stub of the gateway."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from examples.tictactoe.agent import Finished, Fleet, prompt
from examples.tictactoe.game import CELLS, Game, describe, opening_seed
from examples.tictactoe.make_model import MODEL_DIR

pytestmark = pytest.mark.anyio

SEEDS = [opening_seed("val", n) for n in range(20)]


def first_free(board: str) -> str:
    """The move of a player who takes the first free cell."""
    return CELLS[board.index(".")]


class Gateway:
    """Answers prompts as that player would, in another order than asked."""

    def __init__(self, *, fails_at: int = 0) -> None:
        self.prompts: list[list[str]] = []
        self.control: list[tuple[str, dict[str, Any]]] = []
        self.fails_at = fails_at

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content)
        if not path.endswith("/completions"):
            self.control.append((path, body))
            return httpx.Response(
                200, json={"id": body.get("id", ""), "base_url": "http://gateway/t/v1", "api_key": "k"}
            )
        self.prompts.append(body["prompt"])
        if len(self.prompts) == self.fails_at:
            return httpx.Response(400, json={"error": {"message": "no"}})
        boards = [p.rpartition("<|user|>")[2].partition("<|end|>")[0] for p in body["prompt"]]
        cells = ["".join(word[-1] for word in board.split()) for board in boards]
        choices = [
            {"index": i, "text": first_free(c), "finish_reason": "length", "logprobs": None}
            for i, c in enumerate(cells)
        ]
        answer = {
            "id": "c",
            "object": "text_completion",
            "created": 0,
            "model": "m@3",
            "choices": choices[::-1],
        }
        return httpx.Response(200, json=answer)

    async def play(self) -> tuple[Fleet, list[Finished]]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(self)) as http:
            client = openai.AsyncOpenAI(
                base_url="http://gateway/v1", api_key="none", max_retries=0, http_client=http
            )
            fleet = Fleet(client, "m")
            return fleet, await fleet.play_together(SEEDS, group="val-m@3-0", pinned="m@3")


def alone(seed: str) -> Game:
    game = Game(seed)
    while game.result is None:
        game.play(first_free(game.board))
    return game


async def test_games_played_together_end_as_if_played_alone() -> None:
    gateway = Gateway()
    fleet, played = await gateway.play()
    games = [alone(seed) for seed in SEEDS]
    assert [(f.result, f.reward, f.step) for f in played] == [(g.result, g.reward, 3) for g in games]
    assert fleet.calls == len(gateway.prompts) == max(g.moves for g in games)
    (_, opened), (path, done) = gateway.control
    assert (opened["split"], opened["pinned"], opened["group_size"]) == ("val", "m@3", 1)
    assert path.endswith("/trajectories/val-m@3-0/complete")
    assert done["reward"] == pytest.approx(sum(g.reward for g in games) / len(games))
    assert done["metrics"] == {"win": sum(g.result == "win" for g in games) / len(games), "games": len(games)}
    assert fleet.completed == ["val-m@3-0"]


async def test_a_call_that_fails_makes_no_results_of_the_games_it_was_for() -> None:
    gateway = Gateway(fails_at=4)
    fleet, played = await gateway.play()
    games = [alone(seed) for seed in SEEDS]
    assert [f.result for f in played] == [g.result if g.moves < 4 else None for g in games]
    assert gateway.control[-1][1] == {"outcome": "no_result"}
    assert fleet.failed == 1


def test_a_prompt_is_what_the_chat_template_makes() -> None:
    """Else the games played together would be played by another policy than those of training."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    chat = [{"role": "user", "content": describe(".........")}]
    chat += [{"role": "assistant", "content": "a1"}, {"role": "user", "content": describe("xo.......")}]
    for length in (1, 3):
        ids = tokenizer.apply_chat_template(chat[:length], add_generation_prompt=True)["input_ids"]
        assert tokenizer(prompt(chat[:length]))["input_ids"] == ids
