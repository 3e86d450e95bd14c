"""The user of the example: what it objects to, and what it says."""

from __future__ import annotations

from typing import Any

import pytest

from examples.corrections.make_model import taught_game
from examples.corrections.train import exchanged
from examples.corrections.user import objection

WINNING = "xx.oo...."
"""c1 wins, whatever else is free."""


def test_the_user_names_the_right_cell_after_a_bad_move_only() -> None:
    assert objection(WINNING, "c1") == ""
    assert {objection(WINNING, reply) for reply in ("a3", "a1", "what?")} == {"play c1"}


def test_shuffled_words_are_of_another_game_and_each_is_said_once() -> None:
    """Games 0 to 3 have 2, 0, 1 and 2 objections."""
    objections: list[list[Any]] = [
        [(f"{game}.{move}", f"{game}:{move}") for move in range(n)] for game, n in enumerate((2, 0, 1, 2))
    ]
    said: list[Any] = list(exchanged(objections))
    assert [answer for answer, _ in said] == ["0.0", "0.1", "2.0", "3.0", "3.1"]
    assert sorted(words for _, words in said) == ["0:0", "0:1", "2:0", "3:0", "3:1"]
    assert all(answer[0] != words[0] for answer, words in said)
    with pytest.raises(ValueError, match="play more games"):
        exchanged([*objections[:1], objections[2]])


def test_the_base_model_is_taught_to_play_the_named_cell() -> None:
    named = 0
    for number in range(20):
        chat, shares = taught_game(f"test/{number}")
        for asked, share in zip(chat[::2], shares, strict=True):
            *board, last = asked["content"].split("\n")
            assert len(board) in (2, 3)
            if last.startswith("play "):
                named += 1
                assert max(share) == 1.0
    assert named > 10
