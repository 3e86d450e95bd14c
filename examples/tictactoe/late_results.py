"""Reports results of games a while after they ended, as another program than the agent would: a shop's order desk, a
test suite, a customer.

    python -m examples.tictactoe.late_results --gateway URL [--delay 60]

Reads a line of JSON for each game from standard input: `{"answer": id of an answer of the game, "result": number,
"ended": Unix time}`. It knows a game by nothing else. At the end of its input, once all results are reported, it writes
how many were taken and how many refused."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import httpx

NAME = "result"
"""Name of the signal, and of the reward that it becomes."""
AT_ONCE = 16


async def report(gateway: str, delay_s: float) -> dict[str, int]:
    """Return how many results the gateway took and refused."""
    counts = {"taken": 0, "refused": 0}
    headers = {"Authorization": f"Bearer {os.environ.get('JOURNEYWORK_API_KEY', 'none')}"}
    limit = anyio.CapacityLimiter(AT_ONCE)
    async with httpx.AsyncClient(base_url=gateway, headers=headers, timeout=60) as client:

        async def say(game: dict[str, Any]) -> None:
            await anyio.sleep(max(game["ended"] + delay_s - time.time(), 0.0))
            body = {
                "answer": game["answer"],
                "name": NAME,
                "value": game["result"],
                "about": "run",
                "key": f"result/{game['answer']}",
            }
            async with limit:
                reply = await client.post("/v1/feedback", json=body)
            if not reply.is_success and not counts["refused"]:
                print(f"refused: {reply.status_code} {reply.text}", file=sys.stderr, flush=True)
            counts["taken" if reply.is_success else "refused"] += 1

        async with anyio.create_task_group() as tasks:
            while line := await anyio.to_thread.run_sync(sys.stdin.readline):
                tasks.start_soon(say, json.loads(line))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.tictactoe.late_results")
    parser.add_argument("--gateway", required=True)
    parser.add_argument("--delay", type=float, default=60.0, help="seconds after the end of a game")
    args = parser.parse_args()
    print(json.dumps(anyio.run(report, args.gateway, args.delay)))


if __name__ == "__main__":
    main()
