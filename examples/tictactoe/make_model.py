"""Makes `examples/tictactoe/model`: a tokenizer and a small Qwen3, pre-trained on a mixture of weak and strong play.

    python -m examples.tictactoe.make_model [--out DIR] [--seed N] [--steps N]

The teacher decides each move anew: `STRONG` of the time it plays well (wins if it can, else blocks, else centre, else
corner), a little of the time it names a taken cell, and otherwise it plays as one who sees no lines: any cell but those
that would win or block. The model that imitates it wins about 0.4 of its games, and the good move has a fair share of
its probability in every position: skill that is there but rarely used, which is what GRPO needs to find.
"""

# ruff: noqa: N806 - tensors' names end in their shape: B games, T tokens, D width, N moves, V vocabulary
from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.tictactoe.game import CELLS, Game, completing, describe, free_cells

MODEL_DIR = Path(__file__).parent / "model"

END, PAD = "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
MARKS = "xo."

STRONG = 0.28
"""Share of the teacher's moves that are good ones."""
ILLEGAL = 0.02
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


def teach(board: str) -> list[float]:
    """Probability with which the teacher names each cell, for `x` to move."""
    free = free_cells(board)
    taken = [i for i in range(9) if i not in free]
    wins, blocks = completing(board, "x"), completing(board, "o")
    corners = [i for i in (0, 2, 6, 8) if i in free]
    good = wins or blocks or ([4] if 4 in free else corners or free)
    blind = [i for i in free if i not in wins and i not in blocks] or free
    illegal = ILLEGAL if taken else 0.0
    share = [0.0] * 9
    for cells, weight in ((taken, illegal), (good, STRONG), (blind, 1 - STRONG - illegal)):
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


def pretrain(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, seed: int, steps: int, batch: int = 64
) -> None:
    """Cross entropy against the teacher's distribution of each move, and against the end token after it."""
    peak = 3e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=peak, total_steps=steps, pct_start=0.05, cycle_momentum=False, final_div_factor=4
    )
    assistant, end = tokenizer.convert_tokens_to_ids([ROLES[2], END])
    cell_ids = torch.tensor(tokenizer.convert_tokens_to_ids(list(CELLS)))
    started = time.monotonic()
    model.train()
    for step in range(steps):
        games = [taught_game(f"pretrain/{seed}/{step * batch + i}") for i in range(batch)]
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
        (move_loss + end_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            print(
                f"step {step}: divergence from the teacher {move_loss.item() - floor.item():.4f} nats a move, "
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
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    if args.steps:
        pretrain(model, tokenizer, seed=args.seed, steps=args.steps)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
