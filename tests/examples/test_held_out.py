"""Held-out games that are played together, with a stub of the gateway."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from examples.tictactoe.game import CELLS, REWARDS, Game, describe, opening_seed
from examples.tictactoe.held_out import batches, play, play_together, prompt
from examples.tictactoe.make_model import MODEL_DIR
from journeywork import Trajectory

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
        answer = {"id": "c", "object": "text_completion", "created": 0, "model": "m@3", "choices": choices[::-1]}
        return httpx.Response(200, json=answer)


@contextlib.asynccontextmanager
async def serving(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Trajectory]:
    """A run whose calls reach `gateway`."""
    async with httpx.AsyncClient(transport=httpx.MockTransport(gateway)) as http:
        made = openai.AsyncOpenAI
        monkeypatch.setattr(
            openai, "AsyncOpenAI", lambda **more: made(**more | {"http_client": http, "max_retries": 0})
        )
        yield Trajectory("t", "m", "g", "http://gateway/v1", "k")


def alone(seed: str) -> Game:
    game = Game(seed)
    while game.result is None:
        game.play(first_free(game.board))
    return game


async def test_games_played_together_end_as_if_played_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway()
    async with serving(gateway, monkeypatch) as run:
        played = await play_together(run, SEEDS)
    games = [alone(seed) for seed in SEEDS]
    assert [(g.result, g.reward) for g in played] == [(g.result, g.reward) for g in games]
    assert len(gateway.prompts) == max(g.moves for g in games)


async def test_the_result_of_a_batch_is_the_share_of_its_games(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Gateway(), monkeypatch) as run:
        reward = await play(run, {"id": "b", "seeds": SEEDS})
    games = [alone(seed) for seed in SEEDS]
    assert reward == pytest.approx(sum(g.reward for g in games) / len(games))
    assert run.metrics["win"] == sum(g.result == "win" for g in games) / len(games)
    assert sum(run.metrics[kind] for kind in REWARDS) == pytest.approx(1)


async def test_a_call_that_fails_leaves_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Gateway(fails_at=4), monkeypatch) as run:
        with pytest.raises(openai.BadRequestError):
            await play(run, {"id": "b", "seeds": SEEDS})
    assert not run.metrics


def test_batches_hold_every_game_once() -> None:
    for games in (2000, 32, 5):
        listed = [seed for batch in batches(games) for seed in batch["seeds"]]
        assert listed == [opening_seed("val", n) for n in range(games)]
    assert len(batches()) == 50
    assert len({batch["id"] for batch in batches()}) == 50


def test_a_prompt_is_what_the_chat_template_makes() -> None:
    """Else the games played together would be played by another policy than those of training."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    chat = [{"role": "user", "content": describe(".........")}]
    chat += [{"role": "assistant", "content": "a1"}, {"role": "user", "content": describe("xo.......")}]
    for length in (1, 3):
        ids = tokenizer.apply_chat_template(chat[:length], add_generation_prompt=True)["input_ids"]
        assert tokenizer(prompt(chat[:length]))["input_ids"] == ids
