"""The desk: customers' tickets, and the rules of a good reply. A ticket is made from a seed."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

SYSTEM = "Reply as the support desk."
ITEMS = ("lamp", "chair", "kettle", "jacket", "bicycle", "radio", "table", "clock")
ACTIONS = {
    "arrived broken": "We exchange it.",
    "never arrived": "We send it again.",
    "has the wrong size": "A return label is on its way.",
    "was charged twice": "We refund the second charge.",
}
"""The right action for each problem."""
MOODS = {"I am furious!": "We are very sorry.", "Could you please help?": "Thank you for writing."}
"""The right first sentence for each customer."""
ORDERS = tuple(range(10, 60))
VOUCHER = "You also get a voucher."
_TICKET = re.compile(
    rf"Order (\d+): my (?:{'|'.join(ITEMS)}) ({'|'.join(ACTIONS)})\. ({'|'.join(map(re.escape, MOODS))})"
)


@dataclass(frozen=True)
class Ticket:
    order: int
    item: str
    problem: str
    mood: str

    @property
    def text(self) -> str:
        """The ticket as the customer writes it."""
        return f"Order {self.order}: my {self.item} {self.problem}. {self.mood}"


def ticket(seed: str) -> Ticket:
    draw = random.Random(f"support/{seed}")
    return Ticket(draw.choice(ORDERS), draw.choice(ITEMS), draw.choice(list(ACTIONS)), draw.choice(list(MOODS)))


def reply_to(asked: Ticket, *, opening: str = "", action: str = "", order: int = 0, voucher: bool = False) -> str:
    """Return the reply that keeps all rules, but for what is given."""
    said = [opening or MOODS[asked.mood], action or ACTIONS[asked.problem], f"Your order is {order or asked.order}."]
    return " ".join([*said, VOUCHER] if voucher else said)


def kept_rules(text: str, reply: str) -> dict[str, bool]:
    """Return which rules a reply keeps, by name. `text` holds one ticket. Raises `ValueError` if it holds none."""
    match = _TICKET.search(text)
    if match is None:
        raise ValueError("no ticket of this desk")
    order, problem, mood = match.groups()
    actions = [action for action in ACTIONS.values() if action in reply]
    return {
        "action": actions == [ACTIONS[problem]],
        "opening": reply.lstrip().startswith(MOODS[mood]),
        "order": re.findall(r"\d+", reply) == [order],
        "no_voucher": "voucher" not in reply,
    }


def score(context: str, attempt: str) -> float:
    """What the stand-in for a judge model gives a reply, by the rules of `rubric.md`: the action counts 0.4, each other
    rule 0.2. `context` holds the ticket, `attempt` the reply, as RULER shows them."""
    rules = kept_rules(context, attempt.partition("[assistant]")[2])
    return round(0.4 * rules["action"] + 0.2 * (sum(rules.values()) - rules["action"]), 2)


def keeps_all_rules(text: str, reply: str) -> bool:
    return all(kept_rules(text, reply).values())
