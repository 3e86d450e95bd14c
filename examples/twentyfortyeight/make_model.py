"""Makes the tiny base model of this example: a tokenizer and a small Qwen3, pre-trained to play 2048 badly.

    python -m examples.twentyfortyeight.make_model [--out DIR] [--seed N] [--steps N]

The teacher decides each move anew: `STRONG` of the time it plays the move with the most points over this turn and
the next, a little of the time it names a move that changes nothing, and otherwise it plays a legal move that earns the
least. So the best move has a considerable probability in every position, and GRPO can find and reinforce it."""

from __future__ import annotations

import random
from functools import cache

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.common import tiny
from examples.twentyfortyeight.game import CELLS, LINES, RULES, TILES, Board, Game, describe, legal, moved

STRONG = 0.3
"""Share of the teacher's moves that are the best move."""
ILLEGAL = 0.02
"""Share of the teacher's moves that change nothing, where there are such."""
GAMES = 3000
"""Different games of the teacher."""
BATCH = 36
"""Games in a step of pre-training."""
MOVES = tuple(LINES)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each move, for each state of a cell, and for the rules as a whole."""
    states = [f"{cell}={tile or '.'}" for cell in CELLS for tile in TILES]
    moves = [tiny.word_token(move, single_word=True) for move in MOVES]
    return tiny.make_tokenizer([RULES, *moves, *map(tiny.word_token, states)])


@cache
def next_points(board: Board) -> float:
    """Mean over the places of a new 2 of the most points that the move after it can earn."""
    free = [i for i, tile in enumerate(board) if not tile]
    boards = [(*board[:i], 2, *board[i + 1 :]) for i in free]
    return sum(max(moved(b, move)[1] for move in MOVES) for b in boards) / max(len(boards), 1)


def teach(board: Board) -> list[float]:
    """Probability with which the teacher names each of `MOVES`."""
    can = legal(board)
    points = {move: moved(board, move)[1] for move in can}
    worth = {move: points[move] + next_points(moved(board, move)[0]) for move in can}
    best = [move for move in can if worth[move] > max(worth.values()) - 1e-9]
    blind = [move for move in can if points[move] == min(points.values())]
    cannot = [move for move in MOVES if move not in can]
    illegal = ILLEGAL if cannot else 0.0
    share = dict.fromkeys(MOVES, 0.0)
    for moves, weight in ((cannot, illegal), (best, STRONG), (blind, 1 - STRONG - illegal)):
        for move in moves:
            share[move] += weight / len(moves)
    return list(share.values())


def taught_game(seed: str) -> tuple[tiny.Chat, list[list[float]]]:
    """One game of the teacher as a chat, and the distribution of each of its moves."""
    rng, game = random.Random(f"teacher/{seed}"), Game(seed)
    chat: tiny.Chat = [{"role": "system", "content": RULES}]
    shares = []
    while not game.over:
        shares.append(teach(game.board))
        move = rng.choices(MOVES, shares[-1])[0]
        chat += [{"role": "user", "content": describe(game.board)}, {"role": "assistant", "content": move}]
        game.play(move)
    return chat, shares


def main() -> None:
    args = tiny.arguments(__doc__, tiny.MODELS / "twentyfortyeight", steps=220)
    tokenizer = make_tokenizer()
    games = [taught_game(f"pretrain/{args.seed}/{n}") for n in range(min(GAMES, args.steps * BATCH))]
    rng = random.Random(args.seed)

    def loss_of(model: Qwen3ForCausalLM, _: int) -> torch.Tensor:
        return tiny.choice_loss(model, tokenizer, MOVES, rng.sample(games, BATCH))

    tiny.make(args, tokenizer, loss_of)


if __name__ == "__main__":
    main()
