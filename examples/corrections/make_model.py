"""Makes the example's base model: the demo's (`examples.tictactoe.make_model`), which also follows a named move.

    python -m examples.corrections.make_model --out runs/models/corrections [--seed N] [--steps N]

Under half of the boards it was taught, one cell was named in the user's words, a good or a bad one, and the teacher
played it. Without such words it plays as weakly as the demo's model."""

from __future__ import annotations

import random

from examples.common import tiny
from examples.corrections.user import words
from examples.tictactoe.game import CELLS, Game, describe, free_cells
from examples.tictactoe.make_model import make_player, teach

NAMED = 0.5
"""Share of the boards with a move named under it."""


def taught_game(seed: str) -> tuple[tiny.Chat, list[list[float]]]:
    """One game of the teacher as a chat, and the distribution of each of its moves."""
    rng = random.Random(f"teacher/{seed}")
    game = Game(seed)
    chat: tiny.Chat = []
    shares = []
    while game.result is None:
        share, said = teach(game.board), describe(game.board)
        if rng.random() < NAMED:
            named = rng.choice(free_cells(game.board))
            share, said = [float(cell == named) for cell in range(9)], f"{said}\n{words(named)}"
        shares.append(share)
        chat.append({"role": "user", "content": said})
        chat.append({"role": "assistant", "content": rng.choices(CELLS, share)[0]})
        game.play(chat[-1]["content"])
    return chat, shares


if __name__ == "__main__":
    make_player(__doc__, tiny.MODELS / "corrections", 600, taught_game)
