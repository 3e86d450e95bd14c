"""Makes the example's base model: the demo's (`examples.tictactoe.make_model`), which also follows a named move.

    python -m examples.corrections.make_model --out runs/models/corrections [--seed N] [--steps N]

Under half of the boards it was taught, one cell was named in the user's words, a good or a bad one, and the teacher
played it. Without such words it plays as weakly as the demo's model."""

from __future__ import annotations

import functools
import random

from examples.corrections.user import words
from examples.tictactoe import make_model
from examples.tictactoe.game import describe, free_cells
from examples.tictactoe.make_model import make_player, teach
from trainer import tiny

NAMED = 0.5
"""Share of the boards with a move named under it."""


def asked(board: str, rng: random.Random) -> tuple[list[float], str]:
    """The distribution of the teacher's move on a board, and what the model is asked."""
    if rng.random() >= NAMED:
        return teach(board), describe(board)
    named = rng.choice(free_cells(board))
    return [float(cell == named) for cell in range(9)], f"{describe(board)}\n{words(named)}"


taught_game = functools.partial(make_model.taught_game, ask=asked)


if __name__ == "__main__":
    make_player(__doc__, tiny.MODELS / "corrections", 600, taught_game)
