"""Makes the example's base model: a tiny Qwen3 that plays both roles, and both of them badly.

    python -m examples.langgraph_team.make_model --out runs/models/langgraph_team [--seed N] [--steps N]

The teacher that it imitates proposes any time half of the time, whether Ann is free or not and whether it was refused
or not, and the teacher's checker is wrong about Ben in one of four answers. A time is one token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from tokenizers import AddedToken
from transformers import Qwen3ForCausalLM

from examples.common import tiny
from examples.langgraph_team.calendars import CHECKER, PROPOSER, ROUNDS, TIMES, Scenario, scenario

REPLIES = (*TIMES, "yes", "no")
INFORMED = 0.5
"""Share of the teacher's proposals that are one of Ann's free times; the others are any time."""
CAREFUL = 0.75
"""Share of the teacher's answers about Ben that are right."""
BATCH = 40
"""Scenarios in a step of pre-training."""

Taught = tuple[tiny.Chat, list[list[float]]]


def proposals(task: Scenario) -> list[float]:
    """Probability with which the teacher proposes each time."""
    anything = (1 - INFORMED) / len(TIMES)
    return [anything + (INFORMED / len(task.ann) if time in task.ann else 0) for time in TIMES]


def answers(task: Scenario, proposed: str, careful: float = CAREFUL) -> list[float]:
    """Probability of the teacher's `yes` and `no`."""
    yes = careful if proposed in task.ben else 1 - careful
    return [yes, 1 - yes]


def turn(seen: Sequence[tuple[str, str]], reply: str, shares: list[float]) -> Taught:
    """One call of the model as a chat, with the teacher's probability of each possible reply."""
    chat = [{"role": role, "content": content} for role, content in (*seen, ("assistant", reply))]
    return chat, [shares]


def taught_run(task: Scenario, draw: random.Random, careful: float = CAREFUL) -> list[Taught]:
    """The calls of one run of the teacher, whose checker is right in this share of its answers."""
    calls = []
    refused: list[str] = []
    while len(refused) < ROUNDS:
        shares = proposals(task)
        (proposed,) = draw.choices(TIMES, shares)
        calls.append(turn(task.for_proposer(refused), proposed, [*shares, 0.0, 0.0]))
        shares = answers(task, proposed, careful)
        (answer,) = draw.choices(("yes", "no"), shares)
        calls.append(turn(task.for_checker(proposed), answer, [0.0] * len(TIMES) + shares))
        if answer == "yes":
            break
        refused.append(proposed)
    return calls


def words() -> list[str | AddedToken]:
    """The words of the tokenizer: the instructions, the times, the entries of a calendar, and what precedes them."""
    alone = (*TIMES, "yes", "no", "none", "Refused:", "Proposed:")
    return [
        *(tiny.word_token(word, single_word=True) for word in alone),
        *(tiny.word_token(f"{time}: {state}") for time in TIMES for state in ("free", "busy")),
        PROPOSER,
        CHECKER,
    ]


def main() -> None:
    args = tiny.arguments(__doc__, tiny.MODELS / "langgraph_team", steps=250)
    tokenizer = tiny.make_tokenizer(words())

    def loss_of(model: Qwen3ForCausalLM, step: int) -> torch.Tensor:
        draw = random.Random(f"teacher/{args.seed}/{step}")
        tasks = [scenario("pretrain", step * BATCH + n, args.seed) for n in range(BATCH)]
        # To find an entry in a calendar is hard to learn from a teacher who is often wrong about it, so it errs later.
        careful = 1.0 if step < args.steps / 2 else CAREFUL
        taught = [call for task in tasks for call in taught_run(task, draw, careful)]
        return tiny.choice_loss(model, tokenizer, REPLIES, taught)

    tiny.make(args, tokenizer, loss_of)


if __name__ == "__main__":
    main()
