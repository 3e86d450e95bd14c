"""Makes the tiny base model of this project, in about a minute on one core. No weights are fetched.

    python make_model.py

The model knows each number of the task as one token and reads any other text byte by byte. It is taught to give up
often, else to guess the sum: RL strengthens what the base model sometimes does. For your own task, replace `WORDS`, all
replies that it may give, and `teach`, how likely a weak teacher gives each of them. For real work, name a real model in
journeywork.toml instead.
"""

from __future__ import annotations

import functools
import math
import random
from pathlib import Path

import torch
from agent import HELD_OUT, SUMS, Task
from transformers import Qwen3ForCausalLM

from trainer import tiny

NUMBERS = [str(number) for number in range(199)]
WORDS = [*NUMBERS, "I do not know."]
GIVES_UP = 0.6
"""Share of the questions that the teacher does not answer."""


@functools.cache
def teach(answer: int) -> list[float]:
    """The probability of each of `WORDS` where `answer` is right. Of the numbers, the nearer is the likelier."""
    weights = [math.exp(-abs(int(number) - answer)) for number in NUMBERS]
    return [(1 - GIVES_UP) * weight / sum(weights) for weight in weights] + [GIVES_UP]


def taught(task: Task) -> tuple[tiny.Chat, list[list[float]]]:
    """A conversation and the teacher's probabilities of its reply."""
    question = {"role": "user", "content": task.question}
    return [question, {"role": "assistant", "content": str(task.answer)}], [teach(task.answer)]


if __name__ == "__main__":
    args = tiny.arguments(__doc__, Path("base"), steps=400)
    tokenizer = tiny.make_tokenizer(WORDS)

    def loss_of(model: Qwen3ForCausalLM, step: int) -> torch.Tensor:
        tasks = random.Random(f"{args.seed}-{step}").choices(SUMS[HELD_OUT:], k=128)
        return tiny.choice_loss(model, tokenizer, WORDS, [taught(task) for task in tasks])

    tiny.make(args, tokenizer, loss_of)
