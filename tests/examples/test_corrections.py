"""The user of the example: what it objects to, and what it says."""

from __future__ import annotations

from examples.corrections.make_model import taught_game
from examples.corrections.train import GAMES, User
from examples.corrections.user import objection

WINNING = "xx.oo...."
"""c1 wins, whatever else is free."""


def test_the_user_names_the_right_cell_after_a_bad_move_only() -> None:
    assert objection(WINNING, "c1") == ""
    assert {objection(WINNING, reply) for reply in ("a3", "a1", "what?")} == {"play c1"}


def test_shuffled_words_are_earlier_ones_and_keep_their_number() -> None:
    user = User(shuffled=True)
    said = [user.says(WINNING, "a3") for _ in range(GAMES + 5)]
    assert said == [""] * GAMES + ["play c1"] * 5
    assert user.says(WINNING, "c1") == ""
    assert user.objections == 5


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
