"""The rules, the seeded opponent, the board as text, and the rewards.

The agent plays `x`, the opponent `o`; who begins is drawn from the game's seed. A board is a string of nine characters,
cells `a1 b1 c1 a2 … c3`, each `x`, `o` or `.`. The model sees one word a cell (`b2=x`) and answers with a cell's name.

The opponent's whole behaviour is fixed by the seed: for its k-th move it holds a random order of the cells and takes
the first free one. Its moves are uniformly random, and games with one seed differ only by what the agent does, so the
games of a group are comparable and the same held-out games can be played before and after training.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

Result = Literal["win", "draw", "loss", "illegal"]

CELLS: tuple[str, ...] = tuple(f"{column}{row}" for row in "123" for column in "abc")
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
EMPTY = "." * 9

REWARDS: dict[Result, float] = {"win": 1.0, "draw": 0.4, "loss": 0.0, "illegal": -1.0}
"""The agent's reward for each result."""


def has_won(board: str, mark: str) -> bool:
    """Whether three cells in a line have the mark."""
    return any(all(board[i] == mark for i in line) for line in LINES)


def free_cells(board: str) -> list[int]:
    """Return the indices of the cells without a mark."""
    return [i for i, mark in enumerate(board) if mark == "."]


def completing(board: str, mark: str) -> list[int]:
    """Return the free cells that would complete a line of `mark`."""
    return [i for i in free_cells(board) if has_won(put(board, i, mark), mark)]


def put(board: str, cell: int, mark: str) -> str:
    """Return `board` with `mark` on `cell`. Raises `ValueError` if the cell is taken."""
    if board[cell] != ".":
        raise ValueError(f"{CELLS[cell]} is taken")
    return board[:cell] + mark + board[cell + 1 :]


def describe(board: str) -> str:
    """Return the board as the model reads it: one word a cell, one row a line."""
    words = [f"{name}={mark}" for name, mark in zip(CELLS, board, strict=True)]
    return "\n".join(" ".join(words[row : row + 3]) for row in (0, 3, 6))


def opening_seed(split: str, number: int, seed: int = 0) -> str:
    """Return the name of a game's seed. Held-out games (`val`) are the same whatever the run's seed; training games are
    not."""
    return f"val/{number}" if split == "val" else f"{split}/{seed}/{number}"


@dataclass
class Game:
    """One game. `board` is to be shown to the agent while `result` is None."""

    seed: str
    board: str = EMPTY
    result: Result | None = None
    moves: int = 0
    """Number of moves that the agent has made."""
    _orders: list[list[int]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        """Draw all of the opponent's decisions from the seed. If it begins, make its first move."""
        rng = random.Random(f"tictactoe/{self.seed}")
        opponent_begins = rng.random() < 0.5
        self._orders = [rng.sample(range(9), 9) for _ in range(5)]
        if opponent_begins:
            self._opponent()

    def _opponent(self) -> None:
        """Make the opponent's next move."""
        order = self._orders.pop(0)
        self.board = put(self.board, next(i for i in order if self.board[i] == "."), "o")

    def play(self, move: str | None) -> Result | None:
        """Play the agent's move, as the model wrote it, and the opponent's answer. Returns the result if the game has
        ended. Text that does not name a free cell ends the game as `illegal`."""
        if self.result is not None:
            raise ValueError(f"the game is over: {self.result}")
        cell = CELLS.index(move) if move in CELLS else None
        if cell is None or self.board[cell] != ".":
            self.result = "illegal"
            return self.result
        self.board = put(self.board, cell, "x")
        self.moves += 1
        self.result = self._judge()
        if self.result is None:
            self._opponent()
            self.result = self._judge()
        return self.result

    def _judge(self) -> Result | None:
        """Return the result that the board shows; `None` while the game goes on."""
        if has_won(self.board, "x"):
            return "win"
        if has_won(self.board, "o"):
            return "loss"
        return None if "." in self.board else "draw"

    @property
    def reward(self) -> float:
        """The agent's reward. Only for a game that has ended."""
        assert self.result is not None
        return REWARDS[self.result]
