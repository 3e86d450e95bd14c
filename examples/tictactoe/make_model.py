"""Makes `examples/tictactoe/model`: a tokenizer and a small Qwen3, pre-trained on a mixture of weak and strong play.

    python -m examples.tictactoe.make_model [--out DIR] [--seed N] [--steps N]

The teacher decides each move anew: `STRONG` of the time it plays the move with the best prospects against the
opponent's random play (the whole tree of the game is searched), a little of the time it names a taken cell, and
otherwise it plays a random cell that neither wins nor blocks. The model that imitates it wins about 0.43 of its
games, and the best move has a considerable probability in every position, so GRPO can find and reinforce it. The
better the model imitates its teacher, the better it can become by RL (docs/decisions/sdk.md), so it is trained to
a divergence of 0.02 nats per move."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.tictactoe.game import CELLS, REWARDS, Game, completing, describe, free_cells, has_won, put
from trainer import tiny

MODEL_DIR = Path(__file__).parent / "model"

MARKS = "xo."

STRONG = 0.33
"""Share of the teacher's moves that are the best move."""
ILLEGAL = 0.01
"""Share of the teacher's moves that name a taken cell, where there is one."""
BATCH = 64
"""Games in a step of pre-training."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word of the game.

    A sampled reply decodes to text that renders to the same tokens again, so the turns of a game share their prefix."""
    states = [f"{cell}={mark}" for cell in CELLS for mark in MARKS]
    return tiny.make_tokenizer(
        [*(tiny.word_token(word, single_word=True) for word in CELLS), *map(tiny.word_token, states)]
    )


@cache
def prospects(board: str) -> dict[int, float]:
    """Return the expected reward of each free cell for `x`, whose later moves are the best ones, against random
    play."""
    return {cell: _expected_reward(put(board, cell, "x")) for cell in free_cells(board)}


def _expected_reward(board: str) -> float:
    """Return the expected reward of a board on which `o` is to move at random."""
    if has_won(board, "x"):
        return REWARDS["win"]
    answers = [put(board, cell, "o") for cell in free_cells(board)]
    return sum(map(_best_reward, answers)) / len(answers) if answers else REWARDS["draw"]


def _best_reward(board: str) -> float:
    """Return the expected reward of a board on which `x` is to move, by its best move."""
    if has_won(board, "o"):
        return REWARDS["loss"]
    return max(prospects(board).values()) if "." in board else REWARDS["draw"]


def teach(board: str) -> list[float]:
    """Return the probability with which the teacher names each cell, on a board on which `x` is to move."""
    free = free_cells(board)
    taken = [i for i in range(9) if i not in free]
    wins, blocks, rewards = completing(board, "x"), completing(board, "o"), prospects(board)
    best = [i for i in free if rewards[i] > max(rewards.values()) - 1e-9]
    weak = [i for i in free if i not in wins and i not in blocks] or free
    illegal = ILLEGAL if taken else 0.0
    probabilities = [0.0] * 9
    for cells, weight in ((taken, illegal), (best, STRONG), (weak, 1 - STRONG - illegal)):
        for cell in cells:
            probabilities[cell] += weight / len(cells)
    return probabilities


def taught_game(seed: str) -> tuple[tiny.Chat, list[list[float]]]:
    """Return a game of the teacher as a chat, and the probabilities of the cells at each of its moves."""
    rng = random.Random(f"teacher/{seed}")
    game = Game(seed)
    chat: tiny.Chat = []
    shares = []
    while game.result is None:
        shares.append(share := teach(game.board))
        chat.append({"role": "user", "content": describe(game.board)})
        chat.append({"role": "assistant", "content": rng.choices(CELLS, share)[0]})
        game.play(chat[-1]["content"])
    return chat, shares


def main() -> None:
    args = tiny.arguments(__doc__, MODEL_DIR, steps=400)
    tokenizer = make_tokenizer()

    def loss_of(model: Qwen3ForCausalLM, step: int) -> torch.Tensor:
        games = [taught_game(f"pretrain/{args.seed}/{step * BATCH + i}") for i in range(BATCH)]
        return tiny.choice_loss(model, tokenizer, CELLS, games)

    tiny.make(args, tokenizer, loss_of, width=192, mlp=512)


if __name__ == "__main__":
    main()
