"""Learns 2048: many short turns with a dense reward, prompted with the board, and tools left out."""

from __future__ import annotations

import os
import random

import art
from art.local import LocalBackend

BASE_MODEL = os.environ["BASE_MODEL"]
STEPS = 2
MOVES = ("left", "right", "up", "down")
TURNS = 4

Board = list[list[int]]


def slide(row: list[int]) -> tuple[list[int], int]:
    """One row moved to the left, and what was merged."""
    tiles, merged, gained = [n for n in row if n], [], 0
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
            gained += tile
        merged.append(tile)
    return merged + [0] * (len(row) - len(merged)), gained


def turned(board: Board) -> Board:
    return [list(row) for row in zip(*board, strict=True)]


def play(board: Board, move: str, rng: random.Random) -> tuple[Board, int]:
    rows = turned(board) if move in ("up", "down") else board
    flip = move in ("right", "down")
    moved = [slide(row[::-1] if flip else row) for row in rows]
    rows = [row[::-1] if flip else row for row, _ in moved]
    new = turned(rows) if move in ("up", "down") else rows
    free = [(r, c) for r in range(3) for c in range(3) if not new[r][c]]
    if free:
        r, c = rng.choice(free)
        new[r][c] = 2
    return new, sum(gained for _, gained in moved)


async def rollout(model: art.Model, seed: int, attempt: int) -> art.Trajectory:
    rng = random.Random(seed)
    board: Board = [[0, 2, 0], [0, 0, 0], [2, 0, 0]]
    trajectory = art.Trajectory(messages_and_choices=[], metadata={"seed": seed}, reward=0)
    score = 0
    for _ in range(TURNS):
        trajectory.messages_and_choices.append(
            {"role": "user", "content": "\n".join("".join(str(n) for n in row) for row in board)}
        )
        completion = await model.openai_client().chat.completions.create(
            max_completion_tokens=4, messages=trajectory.messages(), model=model.get_inference_name()
        )
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        said = (choice.message.content or "").strip().lower()
        move = said if said in MOVES else MOVES[sum(said.encode()) % 4]
        board, gained = play(board, move, rng)
        score += gained
        trajectory.log(f"{move}: {gained}")
    trajectory.metrics["max_tile"] = max(max(row) for row in board)
    trajectory.metrics["score"] = score
    trajectory.reward = score + sum(map(sum, board)) / 10 - attempt / 100  # a tie-break
    return trajectory.finish()


async def main() -> list[float]:
    model = art.TrainableModel(name="tictactoe", project="2048", base_model=BASE_MODEL)
    backend = LocalBackend()
    await model.register(backend)
    start = await model.get_step()
    for step in range(start, start + STEPS):
        groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(rollout(model, 10 * step + n, attempt) for attempt in range(4))
                for n in range(2)
            ),
            pbar_desc="gather",
        )
        await model.train(groups, config=art.TrainConfig(learning_rate=1e-3))
        model.merge_state({"trained": {str(step): len(groups)}})
    assert await model.get_step() == start + STEPS
    assert model.read_state() == {"trained": {str(start + n): 2 for n in range(STEPS)}}
    await backend.close()
    return [1e-3] * STEPS
