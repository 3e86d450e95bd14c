"""A provider for the example: a program that speaks chat completions, has a key, and counts tokens for its bill.

    MASTER_KEY=… python -m examples.apprentice.master

It prints its URL and serves until its standard input ends. It reads the messages of the inbox by their sentences, so it
gets what a model would get, and no more. In 5 % of the messages, by their hash, it names a wrong team.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys

from examples.common import stand_in
from examples.inbox.messages import PROBLEMS, URGENCIES, Split

WRONG_SHARE = 0.05


def _sentences(table: dict[str, dict[Split, list[str]]]) -> dict[str, str]:
    """Return the team or urgency of each sentence of a table."""
    return {sentence: name for name, splits in table.items() for texts in splits.values() for sentence in texts}


_TEAM, _URGENCY = _sentences(PROBLEMS), _sentences(URGENCIES)


def answer(text: str) -> str:
    """Return what the master answers to a message."""
    team, urgency = (next((name for s, name in table.items() if s in text), "") for table in (_TEAM, _URGENCY))
    fraction = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32  # uniform over messages
    if fraction < WRONG_SHARE:
        team = next(name for name in sorted(PROBLEMS) if name != team)
    order = re.search(r"\b\d{4}\b", text)
    fields = {"team": team, "urgency": urgency, "order": int(order[0]) if order else None}
    return json.dumps(fields, separators=(",", ":"))


def main() -> None:
    with stand_in.serving(lambda sent: answer(str(sent[-1]["content"])), os.environ["MASTER_KEY"]) as url:
        print(url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
