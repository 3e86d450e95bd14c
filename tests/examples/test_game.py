"""Rules, seeds and rewards of the demo's game."""

import random

import pytest

from examples.tictactoe.game import CELLS, EMPTY, Game, completing, describe, free_cells, has_won, opening_seed, put


def play_out(seed: str, mover: random.Random) -> Game:
    game = Game(seed)
    while game.result is None:
        game.play(CELLS[mover.choice(free_cells(game.board))])
    return game


def test_a_seed_fixes_who_begins_and_what_the_opponent_does() -> None:
    for number in range(20):
        seed = opening_seed("train", number, 7)
        first, second = play_out(seed, random.Random(1)), play_out(seed, random.Random(1))
        assert (first.board, first.result) == (second.board, second.result)
    begun = [Game(opening_seed("val", n)).board != EMPTY for n in range(400)]
    assert 150 < sum(begun) < 250


def test_held_out_games_are_the_same_for_every_run_and_never_trained_on() -> None:
    assert opening_seed("val", 3, seed=0) == opening_seed("val", 3, seed=7)
    train = {opening_seed("train", n, s) for n in range(50) for s in range(3)}
    assert len(train) == 150
    assert not train & {opening_seed("val", n) for n in range(50)}


def test_a_game_ends_with_what_the_board_says() -> None:
    mover = random.Random(0)
    seen = set()
    for number in range(300):
        game = play_out(f"any/{number}", mover)
        seen.add(game.result)
        assert (game.result == "win") == has_won(game.board, "x")
        assert (game.result == "loss") == has_won(game.board, "o")
        assert game.result != "draw" or "." not in game.board
        assert abs(game.board.count("x") - game.board.count("o")) <= 1
    assert seen == {"win", "draw", "loss"}


@pytest.mark.parametrize("reply", ["", "b2 ", "d4", "b2=x", "I play b2", None, "a1"])
def test_what_names_no_free_cell_loses_at_once(reply: str | None) -> None:
    game = Game("any/0", board="x" + "." * 8)
    assert game.play(reply) == "illegal"
    assert game.reward < 0
    with pytest.raises(ValueError, match="over"):
        game.play("a1")


def test_completing_finds_the_cells_that_end_the_game() -> None:
    board = put(put(EMPTY, CELLS.index("a1"), "x"), CELLS.index("b2"), "x")
    assert completing(board, "x") == [CELLS.index("c3")]
    assert completing(board, "o") == []


def test_the_board_is_shown_a_word_a_cell() -> None:
    assert describe("x.......o") == "a1=x b1=. c1=.\na2=. b2=. c2=.\na3=. b3=. c3=o"
