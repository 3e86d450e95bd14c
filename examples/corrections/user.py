"""A program in the place of a user who knows the game: it answers a bad move with the right one, in words."""

from __future__ import annotations

from examples.tictactoe.game import CELLS
from examples.tictactoe.make_model import prospects

TOLERANCE = 1e-9


def words(cell: int) -> str:
    """What the user says when this cell was the right one."""
    return f"play {CELLS[cell]}"


def objection(board: str, reply: str) -> str:
    """What the user says of a reply to a board; empty for a move with the best prospects."""
    worth = prospects(board)
    best = max(worth, key=lambda cell: worth[cell])
    cell = CELLS.index(reply) if reply in CELLS else -1
    return "" if worth.get(cell, -1.0) > worth[best] - TOLERANCE else words(best)
