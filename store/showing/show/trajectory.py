"""`journeywork trajectory show`: the messages, tools, tokens and verdicts of one run.

journeywork trajectory show t-123
journeywork trajectory show t-123 --tokens
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from store.reading.history import History
from store.reading.trajectories import CALLS, trajectory
from store.showing.show.command import Kind, main


def _load(history: History, args: argparse.Namespace) -> dict[str, Any]:
    data = trajectory(history, args.id, {})
    for first in range(CALLS, (data["last"] or 0) + 1, CALLS):
        data["calls"] += trajectory(history, args.id, {"from": str(first)})["calls"]
    for paging in ("from", "last", "count", "step_of"):
        del data[paging]
    if not args.tokens:
        for call in data["calls"]:
            del call["tokens"]
    return data


TRAJECTORY = Kind(
    "trajectory", "/v1/trajectories/", _load, "--tokens",
    {"action": "store_true", "help": "every sampled token with its logprob"},
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(TRAJECTORY, sys.argv[1:]))
