"""The task: two assistants, each of whom sees one calendar only, agree on a time for a meeting.

A scenario is fixed by its seed: the times at which Ann is free, and those at which Ben is free. At least one is common.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

TIMES = tuple(f"{day}-{half}" for day in ("Mon", "Tue", "Wed", "Thu") for half in ("am", "pm"))
FREE = 3
"""Times at which a person is free."""
ROUNDS = 3
"""Proposals, at most."""
COST = 0.2
"""Reward that each proposal after the first costs."""
WRONG = -0.5
"""Reward of a meeting at a time at which one of them is busy."""

PROPOSER = (
    "You arrange a meeting for Ann. Propose one of the times at which she is free and which was not refused. Answer "
    "with the time alone."
)
CHECKER = "You answer for Ben, who was invited to a meeting. Say yes if he is free at the proposed time, else say no."


@dataclass(frozen=True)
class Scenario:
    """Two calendars."""

    ann: tuple[str, ...]
    ben: tuple[str, ...]

    def for_proposer(self, refused: Sequence[str]) -> list[tuple[str, str]]:
        """The messages that the proposer sees after these times were refused."""
        return [
            ("system", PROPOSER),
            ("user", f"Refused: {' '.join(refused) or 'none'}\n{calendar(self.ann)}"),
        ]

    def for_checker(self, proposed: str) -> list[tuple[str, str]]:
        """The messages that the checker sees."""
        return [("system", CHECKER), ("user", f"Proposed: {proposed}\n{calendar(self.ben)}")]

    def reward(self, agreed: str, proposals: int) -> float:
        """What the team earns. `agreed` is the time that the checker accepted, empty if there is none.

        1 for a time that is free for both with the first proposal, less for every further one, `WRONG` for a time that
        is not, and 0 without agreement."""
        if not agreed:
            return 0.0
        both = agreed in self.ann and agreed in self.ben
        return 1.0 - COST * (proposals - 1) if both else WRONG


def calendar(free: Sequence[str]) -> str:
    """A calendar as text, one time a line."""
    return "\n".join(f"{time}: {'free' if time in free else 'busy'}" for time in TIMES)


def scenario(split: str, number: int, seed: int = 0) -> Scenario:
    """The scenario with this number. Those of `val` are the same whatever the run's seed."""
    draw = random.Random(f"{split}/{number}" if split == "val" else f"{split}/{seed}/{number}")
    common = draw.choice(TIMES)
    others = [time for time in TIMES if time != common]
    ann, ben = ({common, *draw.sample(others, FREE - 1)} for _ in range(2))
    # In the order of the week, so that the place in the list says nothing about what is common.
    return Scenario(*(tuple(t for t in TIMES if t in free) for free in (ann, ben)))


def find_time(text: str) -> str:
    """Return the first time that a text names; the text itself if it names none."""
    named = [time for time in TIMES if time in text]
    return min(named, key=text.index) if named else text.strip()
