"""Makes the tiny base model of this example: a tokenizer and a small Qwen3, pre-trained on careless sentences.

    python -m examples.sentences.make_model [--out DIR] [--seed N] [--steps N]

A quarter of the teacher's sentences keep all rules. In the others it decides for each rule anew whether it keeps it,
and draws random words otherwise. So the base model knows the rules, rarely keeps all of them, and GRPO can find and
reinforce that."""

from __future__ import annotations

import random

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.common import tiny
from examples.sentences.reward import TASK
from examples.sentences.tasks import LENGTHS, LETTERS, WORDS, task

CAREFUL = 0.25
"""Share of the teacher's sentences that keep all rules."""
CARE = 0.3
"""How often it keeps a rule on purpose in the others."""
BATCH = 192
"""Sentences in a step of pre-training."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word of a reply, and for each part of a task."""
    parts = [f"Write {length} words." for length in LENGTHS]
    parts += [f" Use: {word}." for word in WORDS]
    parts += [f" Avoid the letter: {letter}. No word twice." for letter in LETTERS]
    return tiny.make_tokenizer([*(f" {word}" for word in WORDS), *parts])


def taught(seed: str) -> tiny.Chat:
    """A task and the teacher's sentence."""
    rng, asked = random.Random(f"teacher/{seed}"), task(seed)
    found = TASK.search(asked)
    assert found is not None
    length, wanted, letter = int(found[1]), found[2], found[3]
    care = 1.0 if rng.random() < CAREFUL else CARE
    if rng.random() > care:
        length = rng.choice(LENGTHS)
    allowed = [word for word in WORDS if letter not in word] if rng.random() < care else list(WORDS)
    words = rng.sample(allowed, length) if rng.random() < care else rng.choices(allowed[:20], k=length)
    if rng.random() < care and wanted not in words:
        words[rng.randrange(length)] = wanted
    reply = "".join(f" {word}" for word in words)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]


def main() -> None:
    args = tiny.arguments(__doc__, tiny.MODELS / "sentences", steps=400)
    tokenizer = make_tokenizer()

    def loss_of(model: Qwen3ForCausalLM, step: int) -> torch.Tensor:
        chats = [taught(f"pretrain/{args.seed}/{step * BATCH + n}") for n in range(BATCH)]
        return tiny.reply_loss(model, tokenizer, chats)

    tiny.make(args, tokenizer, loss_of)


if __name__ == "__main__":
    main()
