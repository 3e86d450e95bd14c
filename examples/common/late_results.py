"""Reports results of games a while after they ended, as another program than the agent would: a shop's order desk, a
test suite, a customer.

    python -m examples.common.late_results --gateway URL [--delay 60]

Reads a line of JSON for each game from standard input: `{"answer": id of an answer of the game, "result": number,
"ended": Unix time}`, and perhaps `"words"`, what somebody says about the answer. It knows a game by nothing else. At
the end of its input, once all results are reported, it writes how many were taken and how many refused."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import anyio
import anyio.to_thread

from journeywork import AsyncJourneywork, JourneyworkError

NAME = "result"
"""Name of the signal, and of the reward that it becomes."""
AT_ONCE = 16


async def report(gateway: str, delay_s: float) -> dict[str, int]:
    """Post the result of each game from standard input when it is due. Return how many the gateway took and refused.

    A gateway that is away or overloaded is asked again, for two minutes. Only the first refusal is printed: the others
    mostly have the same cause."""
    counts = {"taken": 0, "refused": 0}
    limit = anyio.CapacityLimiter(AT_ONCE)
    async with AsyncJourneywork(gateway, api_key=os.environ.get("JOURNEYWORK_API_KEY", "none")) as client:

        async def say(game: dict[str, Any]) -> None:
            await anyio.sleep(max(game["ended"] + delay_s - time.time(), 0.0))
            answer, result = game["answer"], game["result"]
            try:
                async with limit:
                    if words := game.get("words"):  # before the result, at which the run is scored
                        await client.feedback(answer, name="words", text=words, key=f"words/{answer}")
                    await client.feedback(answer, name=NAME, value=result, about="run", key=f"result/{answer}")
            except JourneyworkError as error:
                if not counts["refused"]:
                    print(f"refused: {error}", file=sys.stderr, flush=True)
                counts["refused"] += 1
            else:
                counts["taken"] += 1

        async with anyio.create_task_group() as tasks:
            # A read can't be stopped: an error of a game must not wait for the next line.
            while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
                tasks.start_soon(say, json.loads(line))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.common.late_results")
    parser.add_argument("--gateway", required=True)
    parser.add_argument("--delay", type=float, default=60.0, help="seconds after the end of a game")
    args = parser.parse_args()
    print(json.dumps(anyio.run(report, args.gateway, args.delay)))


if __name__ == "__main__":
    main()
