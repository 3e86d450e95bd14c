"""`journeywork group show`: the members of one group with rewards, the judge's words, last replies and signals.

journeywork group show support-17
journeywork group show support-17 --branch rejudged
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from store.reading.groups import group
from store.reading.history import History
from store.showing.show.command import Kind, main


def _load(history: History, args: argparse.Namespace) -> dict[str, Any]:
    data = group(history, args.id, {"branch": args.branch})
    for ends in ("prompt", "best", "worst"):  # the members' replies are here
        del data[ends]
    return data


GROUP = Kind(
    "group",
    "/v1/groups/",
    _load,
    "--branch",
    {"default": "main", "help": "branch of the history; default: main"},
)

if __name__ == "__main__":
    raise SystemExit(main(GROUP, sys.argv[1:]))
