"""Rules of 2048, and what capture relies on: a move is one token, and the turns of a game share their prefix."""

from __future__ import annotations

import random

import pytest

from examples.twentyfortyeight.game import (
    CELLS,
    LINES,
    MOVES,
    RULES,
    TILES,
    Game,
    describe,
    legal,
    moved,
    slide,
)
from examples.twentyfortyeight.make_model import MOVES as WORDS
from examples.twentyfortyeight.make_model import make_tokenizer, taught_game, teach


def play_out(seed: str, rng: random.Random) -> Game:
    game = Game(seed)
    while not game.over:
        game.play(rng.choice(legal(game.board)))
    return game


@pytest.mark.parametrize(
    ("line", "slid", "points"),
    [
        ((2, 2, 2), (4, 2, 0), 4),
        ((0, 2, 2), (4, 0, 0), 4),
        ((2, 2, 4), (4, 4, 0), 4),
        ((4, 0, 4), (8, 0, 0), 8),
        ((2, 4, 2), (2, 4, 2), 0),
        ((0, 0, 0), (0, 0, 0), 0),
    ],
)
def test_a_line_slides_and_each_tile_merges_once(
    line: tuple[int, ...], slid: tuple[int, ...], points: int
) -> None:
    assert slide(line) == (slid, points)


def test_each_move_slides_to_its_side() -> None:
    board = (2, 0, 0, 0, 0, 0, 2, 0, 0)  # a1 and a3
    assert moved(board, "up") == ((4, *[0] * 8), 4)
    assert moved(board, "down") == ((*[0] * 6, 4, 0, 0), 4)
    assert moved(board, "right") == ((0, 0, 2, 0, 0, 0, 0, 0, 2), 0)
    assert legal(board) == ["right", "up", "down"]
    assert describe(board) == "a1=2 b1=. c1=.\na2=. b2=. c2=.\na3=2 b3=. c3=."


def test_a_seed_fixes_the_new_tiles_and_points_add_up() -> None:
    for number in range(50):
        first, second = (play_out(f"any/{number}", random.Random(number)) for _ in range(2))
        assert (first.board, first.points) == (second.board, second.points)
        assert first.moves == MOVES or not legal(first.board)
        assert set(first.board) <= set(TILES)


@pytest.mark.parametrize("reply", ["", "Left", "b2", None])
def test_a_reply_that_names_no_legal_move_ends_the_game(reply: str | None) -> None:
    game = Game("any/0", points=12)
    game.play(reply)
    assert (game.over, game.points, game.moves) == (True, 12, 0)
    with pytest.raises(ValueError, match="over"):
        game.play("left")


def test_the_teacher_prefers_the_best_move_and_earns_little_otherwise() -> None:
    board = (2, 2, 0, 0, 0, 0, 0, 0, 0)  # left and right earn 4 now, down allows 4 later; up changes nothing
    share = dict(zip(LINES, teach(board), strict=True))
    assert sum(share.values()) == pytest.approx(1)
    assert share == pytest.approx({"left": 0.1, "right": 0.1, "down": 0.1 + 0.68, "up": 0.02})


def test_every_prompt_extends_the_one_before_and_fits_into_the_context() -> None:
    tokenizer = make_tokenizer()
    longest = 0
    for number in range(20):
        chat, _ = taught_game(f"any/{number}")
        before: list[int] = []
        for turn in range(2, len(chat), 2):
            prompt = tokenizer.apply_chat_template(chat[:turn], add_generation_prompt=True)["input_ids"]
            assert prompt[: len(before)] == before
            sampled = tokenizer.convert_tokens_to_ids([chat[turn]["content"]])
            assert tokenizer.decode(sampled) in WORDS
            before = prompt + sampled
            longest = max(longest, len(before))
    assert len(CELLS) * MOVES < longest < 256
    assert len(tokenizer(RULES).input_ids) == 1
