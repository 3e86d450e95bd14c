"""2048 on a 3x3 board with a bounded number of moves.

A board is a tuple of nine numbers, row by row, 0 for a free cell. A move slides all tiles; two equal tiles that meet
become one of twice the value, and that value is earned. A new tile follows, a 2 or (one in ten) a 4.

The new tiles are fixed by the game's seed: for each the game holds a value and a random order of the cells, and takes
the first free one. Games with one seed differ only by what the agent does, so the games of a group are comparable, and
the same held-out games can be played before and after training.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache

Board = tuple[int, ...]

SIZE = 3
CELLS: tuple[str, ...] = tuple(f"{column}{row}" for row in "123" for column in "abc")
TILES = (0, 2, 4, 8, 16, 32, 64)
"""Values that a cell can have within `MOVES` moves."""
MOVES = 10
"""Moves in a game, at most."""
RULES = (
    "You play 2048 on a 3x3 board: columns a to c from left to right, rows 1 to 3 from top to bottom. "
    "Each turn slides all tiles; equal tiles that meet merge and earn points. "
    "Answer with one word: left, right, up or down. A move that changes nothing ends the game."
)
_ROWS = [[row * SIZE + column for column in range(SIZE)] for row in range(SIZE)]
_COLUMNS = [list(column) for column in zip(*_ROWS, strict=True)]
LINES: dict[str, list[list[int]]] = {
    "left": _ROWS,
    "right": [row[::-1] for row in _ROWS],
    "up": _COLUMNS,
    "down": [column[::-1] for column in _COLUMNS],
}
"""For each move, the cells of each line, in the direction that its tiles slide to first."""


@cache
def slide(line: Board) -> tuple[Board, int]:
    """Slide the tiles of a line to its first cell. Returns the line and the points."""
    tiles, out, points = [tile for tile in line if tile], [], 0
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
            points += tile
        out.append(tile)
    return (*out, *[0] * (len(line) - len(out))), points


@cache
def moved(board: Board, move: str) -> tuple[Board, int]:
    """Return the board after the move, before the new tile, and the points of the move."""
    cells, points = list(board), 0
    for line in LINES[move]:
        slid, earned = slide(tuple(board[i] for i in line))
        points += earned
        for i, tile in zip(line, slid, strict=True):
            cells[i] = tile
    return tuple(cells), points


def legal(board: Board) -> list[str]:
    """The moves that change the board."""
    return [move for move in LINES if moved(board, move)[0] != board]


def describe(board: Board) -> str:
    """The board as the model reads it: one word a cell, one row a line."""
    words = [f"{name}={tile or '.'}" for name, tile in zip(CELLS, board, strict=True)]
    return "\n".join(" ".join(words[row[0] : row[-1] + 1]) for row in _ROWS)


@dataclass
class Game:
    """One game. `board` is to be shown to the agent while `over` is false."""

    seed: str
    board: Board = (0,) * SIZE**2
    points: int = 0
    moves: int = 0
    over: bool = False
    _tiles: list[tuple[int, list[int]]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        rng = random.Random(f"2048/{self.seed}")
        cells = range(SIZE**2)
        self._tiles = [
            (4 if rng.random() < 0.1 else 2, rng.sample(cells, len(cells))) for _ in range(MOVES + 2)
        ]
        for _ in range(2):
            self._new_tile()

    def _new_tile(self) -> None:
        value, order = self._tiles.pop(0)
        cell = next(i for i in order if not self.board[i])
        self.board = (*self.board[:cell], value, *self.board[cell + 1 :])

    def play(self, move: str | None) -> None:
        """Play the agent's move, as the model wrote it. Text that names no legal move ends the game."""
        if self.over:
            raise ValueError("the game is over")
        if move not in legal(self.board):
            self.over = True
            return
        self.board, points = moved(self.board, move)
        self.points += points
        self.moves += 1
        self._new_tile()
        self.over = self.moves == MOVES or not legal(self.board)
