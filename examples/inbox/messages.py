"""Customers' messages to a shop, and what a reader of the inbox has to find in each: team, urgency, order.

A message is three sentences in any order: a problem, how soon it matters, and the order it is about. Held-out messages
are made of sentences that no training message has, so that a model that learned sentences by heart gains nothing.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "held_out"]

SYSTEM = (
    "You sort the inbox of a shop. Read the customer's message and answer with one line of JSON: its team, its urgency "
    "and the number of the order."
)
"""What the agent is told. It does not say which teams and urgencies there are: that has to be learned. With it nearly
every prompt has more than two of the inference server's blocks of 32 tokens, which the answers to a message share."""

PROBLEMS: dict[str, dict[Split, list[str]]] = {
    "billing": {
        "train": [
            "My card was charged twice.",
            "The invoice shows the wrong amount.",
            "You billed me for something I never bought.",
            "The discount code was not taken off the price.",
            "Please send me a receipt for my taxes.",
            "I was charged shipping although it said free.",
            "The VAT on my bill is too high.",
            "My bank says that you took the money again.",
            "I would like to pay by bank transfer instead.",
            "The price on the bill is not the one I saw.",
            "Why is there a fee of five dollars on my statement?",
            "My gift card was not counted in the total.",
            "The invoice has the name of another company.",
            "Can I pay in three instalments?",
        ],
        "held_out": [
            "There are two payments for the same thing on my account.",
            "The total is higher than what I agreed to pay.",
            "I need a corrected invoice for my accountant.",
            "My voucher was ignored when I paid.",
            "You debited my credit card a second time.",
            "What is this extra charge on my bill?",
        ],
    },
    "delivery": {
        "train": [
            "My parcel has not arrived.",
            "The tracking page has not changed for a week.",
            "The courier left the box at the wrong house.",
            "When will my package come?",
            "The driver said that nobody was home, but I was.",
            "Please send it to my office instead.",
            "The package is stuck in customs.",
            "I have waited for the shipment for days.",
            "The parcel was handed to a neighbour I don't know.",
            "Can it be delivered on Saturday?",
            "The postman could not find my street.",
            "Half of the boxes came, the other half did not.",
            "It says delivered, but there is nothing here.",
            "Please leave it at the pickup point.",
        ],
        "held_out": [
            "Where is my package?",
            "The tracking number does not work.",
            "The courier never rang my bell.",
            "My shipment is late.",
            "Could the parcel go to another address?",
            "Nothing has been delivered so far.",
        ],
    },
    "returns": {
        "train": [
            "I want to send the shoes back.",
            "The shirt is too small, can I swap it?",
            "How do I return this?",
            "I changed my mind and want a refund.",
            "You sent me blue, I ordered red.",
            "Please give me a label to send it back.",
            "It is not what I expected, take it back.",
            "I would like to exchange it for a larger size.",
            "How long do I have to give it back?",
            "I got the wrong model and want to return it.",
            "The refund for what I sent back is missing.",
            "I don't need it any more and want my money back.",
            "Can I bring it back to your store?",
            "The colour does not fit, I am sending it back.",
        ],
        "held_out": [
            "I would like to return the jacket.",
            "The trousers don't fit, please exchange them.",
            "I want my money back for this lamp.",
            "Where do I send things that I don't want to keep?",
            "You packed the wrong item, how can I give it back?",
            "Can I swap it for another colour?",
        ],
    },
    "account": {
        "train": [
            "I can't log in.",
            "I forgot my password.",
            "Please change my email address.",
            "The code to sign in never comes.",
            "Somebody else has used my account.",
            "Please delete my account.",
            "I want to change my user name.",
            "My account is locked.",
            "Stop sending me your newsletter.",
            "The link to reset my password has expired.",
            "I have two accounts, please merge them.",
            "My phone number has changed, how do I update it?",
            "The website says that my user is unknown.",
            "How do I turn on two-factor login?",
        ],
        "held_out": [
            "My password is not accepted.",
            "I am locked out of my profile.",
            "Please close my account.",
            "I never get the mail to reset my password.",
            "I think that my login was hacked.",
            "How can I change the email of my profile?",
        ],
    },
    "repairs": {
        "train": [
            "The screen stays black.",
            "The machine stopped working after a week.",
            "The battery is empty after ten minutes.",
            "A button broke off.",
            "It makes a loud noise when I turn it on.",
            "The zip is broken.",
            "The lamp flickers and then goes out.",
            "Water leaks from the bottom.",
            "The motor smells burnt.",
            "One of the legs of the chair is cracked.",
            "It does not charge any more.",
            "The wifi of the device keeps dropping.",
            "The handle came loose, do you fix that?",
            "The software crashes when it starts.",
        ],
        "held_out": [
            "The device does not turn on.",
            "The display is cracked.",
            "It broke on the second day, is that under warranty?",
            "The fan rattles and stops.",
            "The battery does not hold its charge.",
            "The hinge fell off, can you mend it?",
        ],
    },
    "sales": {
        "train": [
            "Do you have this in green?",
            "When will the tent be in stock again?",
            "Which of the two models is lighter?",
            "Do you give a discount for fifty pieces?",
            "Is the bag large enough for a laptop?",
            "Can I get an offer for our school?",
            "Does the warranty of the new model last longer?",
            "Will there be a sale next month?",
            "Please tell me which filter fits this machine.",
            "Is the table made of oak?",
            "I would like to order ten more of these.",
            "Do you sell spare lids too?",
            "What is the difference to the older model?",
            "Can you recommend a lens for portraits?",
        ],
        "held_out": [
            "Is this available in a larger size?",
            "Do you offer a price for companies?",
            "Which bike would you recommend for a child?",
            "I want to buy twenty more, what do they cost?",
            "Is the kettle made of steel?",
            "When do you get new stock of the boots?",
        ],
    },
}

URGENCIES: dict[str, dict[Split, list[str]]] = {
    "high": {
        "train": [
            "I need an answer today.",
            "This is urgent.",
            "We leave tomorrow morning.",
            "Please hurry.",
            "It can't wait.",
            "I need it now.",
            "Please answer immediately.",
            "It has to be solved before tonight.",
            "I am running out of time.",
            "Call me back as soon as possible.",
            "It is for a birthday tomorrow.",
            "Every hour counts.",
        ],
        "held_out": [
            "I need this solved right now.",
            "It is very urgent.",
            "Our flight is tomorrow.",
            "Please reply as soon as you can, I am in a hurry.",
            "I must have it today.",
        ],
    },
    "normal": {
        "train": [
            "There is no rush.",
            "Take your time.",
            "Answer whenever you like.",
            "It is not important.",
            "Next month is early enough.",
            "Thanks for your help.",
            "Kind regards.",
            "I look forward to your answer.",
            "Any day is fine.",
            "Have a nice weekend.",
            "Thank you in advance.",
            "I am just curious.",
        ],
        "held_out": [
            "There is no need to rush.",
            "Thank you very much.",
            "Answer when you have time.",
            "Best regards.",
            "Next week is fine.",
        ],
    },
}

ORDERS: dict[Split, list[str]] = {
    "train": [
        "My order is {order}.",
        "Order number {order}.",
        "It is about order {order}.",
        "The number on the slip is {order}.",
        "Order: {order}.",
    ],
    "held_out": ["This is for order {order}.", "You find it under number {order}.", "Reference {order}."],
}


@dataclass(frozen=True)
class Message:
    """A message of a customer, and the right fields of its answer."""

    id: str
    text: str
    team: str
    urgency: str
    order: int

    @property
    def prompt(self) -> list[dict[str, str]]:
        """What the agent sends to the model."""
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.text}]

    @property
    def right(self) -> str:
        """The right answer."""
        fields = {"team": self.team, "urgency": self.urgency, "order": self.order}
        return json.dumps(fields, separators=(",", ":"))


def message(split: Split, number: int, seed: int = 0) -> Message:
    """Return the message with this number. Held-out messages are the same for each seed. Of 12 consecutive numbers,
    each has another pair of team and urgency."""
    name = f"{split}/{number}" if split == "held_out" else f"{split}/{seed}/{number}"
    drawn = random.Random(name)
    teams, urgencies = sorted(PROBLEMS), sorted(URGENCIES)
    team = teams[number % len(teams)]
    urgency = urgencies[(number + number // len(teams)) % len(urgencies)]
    order = drawn.randrange(1000, 10_000)
    sentences = [
        drawn.choice(PROBLEMS[team][split]),
        drawn.choice(URGENCIES[urgency][split]),
        drawn.choice(ORDERS[split]).format(order=order),
    ]
    drawn.shuffle(sentences)
    return Message(name, " ".join(sentences), team, urgency, order)


def right_fields(message: Message, answer: str) -> dict[str, float]:
    """Return for each field of the answer to a message whether it is right, 1 or 0, and in `solved` whether all are. An
    answer that is not one JSON object has no right field."""
    try:
        decoded: Any = json.loads(answer)
    except (ValueError, RecursionError):
        decoded = None
    answered = decoded if isinstance(decoded, dict) else {}
    fields = {name: float(answered.get(name) == getattr(message, name)) for name in ("team", "urgency", "order")}
    return {**fields, "solved": float(all(fields.values()))}


def share(right: dict[str, float]) -> float:
    """Return the share of right fields, from the result of `right_fields`. It is the reward."""
    return (right["team"] + right["urgency"] + right["order"]) / 3
