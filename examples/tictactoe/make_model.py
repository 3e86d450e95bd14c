"""Makes `examples/tictactoe/model`: a tokenizer and a small Qwen3, pre-trained on a mixture of weak and strong play.

    python -m examples.tictactoe.make_model [--out DIR] [--seed N] [--steps N]

The teacher decides each move anew: `STRONG` of the time it plays the move with the best prospects against the
opponent's random play (the whole tree of the game is searched), a little of the time it names a taken cell, and
otherwise it plays a random cell that neither wins nor blocks. The model that imitates it wins about 0.43 of its
games, and the best move has a considerable probability in every position, so GRPO can find and reinforce it. The
better the model imitates its teacher, the better it can become by RL (docs/negative-results.md), so it is trained to
a divergence of 0.02 nats per move."""

# ruff: noqa: N806 - tensors' names end in their shape: B games, T tokens, D width, N moves, V vocabulary
from __future__ import annotations

import argparse
import random
import time
from functools import cache
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.tictactoe.game import CELLS, REWARDS, Game, completing, describe, free_cells, has_won, put

MODEL_DIR = Path(__file__).parent / "model"

END, PAD = "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
MARKS = "xo."

STRONG = 0.33
"""Share of the teacher's moves that are the best move."""
ILLEGAL = 0.01
"""Share of the teacher's moves that name a taken cell, where there is one."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message.role + '|>' + (message.content or '') -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, so that any text can be read, and a token of its own for each word of the game.

    A sampled reply decodes to text that renders to the same tokens again, so the turns of a game share their prefix."""
    # Bytes are spelled as GPT-2 does; no merges: what is not a word of the game costs a token a byte.
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in (PAD, END, *ROLES)]
    )
    states = [f"{cell}={mark}" for cell in CELLS for mark in MARKS]
    tokenizer.add_tokens(
        [AddedToken(w, single_word=True, lstrip=True, rstrip=True, normalized=False) for w in CELLS]
        + [AddedToken(w, lstrip=True, rstrip=True, normalized=False) for w in states]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    vocabulary = -(-len(tokenizer) // 64) * 64
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=1024,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


@cache
def prospects(board: str) -> dict[int, float]:
    """Expected reward of each free cell for `x`, whose later moves are the best ones, against random play."""
    return {cell: _after(put(board, cell, "x")) for cell in free_cells(board)}


def _after(board: str) -> float:
    """Expected reward once `x` has moved, over the opponent's answers."""
    if has_won(board, "x"):
        return REWARDS["win"]
    answers = [put(board, cell, "o") for cell in free_cells(board)]
    return sum(map(_answered, answers)) / len(answers) if answers else REWARDS["draw"]


def _answered(board: str) -> float:
    if has_won(board, "o"):
        return REWARDS["loss"]
    return max(prospects(board).values()) if "." in board else REWARDS["draw"]


def teach(board: str) -> list[float]:
    """Probability with which the teacher names each cell, for `x` to move."""
    free = free_cells(board)
    taken = [i for i in range(9) if i not in free]
    wins, blocks, worth = completing(board, "x"), completing(board, "o"), prospects(board)
    best = [i for i in free if worth[i] > max(worth.values()) - 1e-9]
    blind = [i for i in free if i not in wins and i not in blocks] or free
    illegal = ILLEGAL if taken else 0.0
    share = [0.0] * 9
    for cells, weight in ((taken, illegal), (best, STRONG), (blind, 1 - STRONG - illegal)):
        for cell in cells:
            share[cell] += weight / len(cells)
    return share


def taught_game(seed: str) -> tuple[list[dict[str, str]], list[list[float]]]:
    """One game of the teacher as a chat, and the distribution of each of its moves."""
    rng = random.Random(f"teacher/{seed}")
    game = Game(seed)
    chat: list[dict[str, str]] = []
    shares = []
    while game.result is None:
        shares.append(teach(game.board))
        chat.append({"role": "user", "content": describe(game.board)})
        chat.append({"role": "assistant", "content": rng.choices(CELLS, shares[-1])[0]})
        game.play(chat[-1]["content"])
    return chat, shares


def imitation(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    games: list[tuple[list[dict[str, str]], list[list[float]]]],
) -> tuple[torch.Tensor, float]:
    """The loss over games of `taught_game`: cross entropy against the teacher's distribution of each move, and
    against the end token after it. Also returns the divergence from the teacher in nats per move, which a perfect
    imitation would reduce to 0."""
    assistant, end = tokenizer.convert_tokens_to_ids([ROLES[2], END])
    cell_ids = torch.tensor(tokenizer.convert_tokens_to_ids(list(CELLS)))
    texts = tokenizer.apply_chat_template([chat for chat, _ in games], tokenize=False)
    # Padding is on the right and has no target: causal attention needs no mask for it.
    ids_BT = tokenizer(texts, padding=True, return_tensors="pt").input_ids
    decides_BT = ids_BT == assistant
    hidden_BTD = model.model(input_ids=ids_BT).last_hidden_state
    ends_BT = torch.roll(decides_BT, 1, dims=1)
    logprobs_NV = model.lm_head(hidden_BTD[decides_BT]).log_softmax(-1)
    shares_N9 = torch.tensor([share for _, shares in games for share in shares])
    move_loss = -(shares_N9 * logprobs_NV[:, cell_ids]).sum(-1).mean()
    floor = torch.special.entr(shares_N9).sum(-1).mean()
    end_loss = -model.lm_head(hidden_BTD[ends_BT]).log_softmax(-1)[:, end].mean()
    return move_loss + end_loss, move_loss.item() - floor.item()


def pretrain(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, seed: int, steps: int, batch: int = 64
) -> None:
    """Imitate the teacher.

    Muon trains the layers' matrices: with it 0.061 nats a move are left after 150 steps, with AdamW alone 0.237."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.0, momentum=0.95),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01),
    ]

    def rate(step: int) -> float:
        """Rises over the first twentieth, and falls from 0.3 of the steps on."""
        left = (steps - step) / (0.7 * steps)
        return min((step + 1) / (0.05 * steps + 1), 1.0) * (0.02 + 0.98 * min(left, 1.0))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    started = time.monotonic()
    model.train()
    for step in range(steps):
        games = [taught_game(f"pretrain/{seed}/{step * batch + i}") for i in range(batch)]
        loss, divergence = imitation(model, tokenizer, games)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            print(
                f"step {step}: divergence from the teacher {divergence:.4f} nats a move, "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400, help="0: leave the weights random")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the same sums in the same order whatever the machine's cores
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    if args.steps:
        pretrain(model, tokenizer, seed=args.seed, steps=args.steps)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
