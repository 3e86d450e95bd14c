"""Makes the example's base model: a tiny Qwen3 that replies in the desk's words and often breaks its rules.

    python -m examples.support.make_model --out runs/models/support [--seed N] [--steps N]

The teacher that it imitates keeps each rule with the probability below, so that about a fifth of its replies keep all.
"""

from __future__ import annotations

import random

import torch
from transformers import Qwen3ForCausalLM

from examples.support.desk import ACTIONS, ITEMS, MOODS, ORDERS, SYSTEM, VOUCHER, Ticket, reply_to, ticket
from trainer import tiny

KEPT = {"action": 0.55, "opening": 0.7, "order": 0.85, "no_voucher": 0.65}
"""How often the teacher keeps a rule. Otherwise it draws any of the others' sentences or orders."""
BATCH = 128
"""Tickets in a step of pre-training."""


def words() -> list[str]:
    """Each part of a ticket and of a reply."""
    ticket_parts = ["Order ", *(f": my {item} " for item in ITEMS), *(f"{problem}. " for problem in ACTIONS), *MOODS]
    reply_parts = [*MOODS.values(), *(f" {action}" for action in ACTIONS.values()), " Your order is ", f" {VOUCHER}"]
    return [SYSTEM, *ticket_parts, *reply_parts, *map(str, ORDERS), "."]


def taught(asked: Ticket, draw: random.Random) -> tiny.Chat:
    """A ticket and the teacher's reply."""
    lost = {rule for rule, kept in KEPT.items() if draw.random() > kept}
    reply = reply_to(
        asked,
        action=draw.choice(list(ACTIONS.values())) if "action" in lost else "",
        opening=draw.choice(list(MOODS.values())) if "opening" in lost else "",
        order=draw.choice(ORDERS) if "order" in lost else 0,
        voucher="no_voucher" in lost,
    )
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": asked.text},
        {"role": "assistant", "content": reply},
    ]


def main() -> None:
    args = tiny.arguments(__doc__, tiny.MODELS / "support", steps=300)
    tokenizer = tiny.make_tokenizer(words())

    def loss_of(model: Qwen3ForCausalLM, step: int) -> torch.Tensor:
        draw = random.Random(f"teacher/{args.seed}/{step}")
        chats = [taught(ticket(f"pretrain/{args.seed}/{step}/{n}"), draw) for n in range(BATCH)]
        return tiny.reply_loss(model, tokenizer, chats)

    tiny.make(args, tokenizer, loss_of)


if __name__ == "__main__":
    main()
