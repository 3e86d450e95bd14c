"""Runs `journeywork.looping` until its scenarios are played, or hangs when ATTEMPTS of them are:

    python -m tests.rollout_gateway.loop_child GATEWAY_URL ATTEMPTS

Each attempt makes one model call. A line is written before each attempt ends, and the loop's figures at the end."""

import json
import sys

import anyio
import httpx

from journeywork import AsyncJourneywork, Trajectory
from journeywork.looping import LoopOptions, loop

SCENARIOS = [f"a1=x b2={n}" for n in range(10)]
GROUP_SIZE, CONCURRENCY = 3, 4


async def main() -> None:
    left = int(sys.argv[2])
    async with AsyncJourneywork(sys.argv[1]) as client, httpx.AsyncClient(timeout=60) as http:

        async def play(run: Trajectory, scenario: str) -> float:
            nonlocal left
            reply = await http.post(
                f"{run.base_url}/chat/completions",
                headers={"authorization": f"Bearer {run.api_key}"},
                json={"model": run.model, "messages": [{"role": "user", "content": scenario}], "max_tokens": 2},
            )
            reply.raise_for_status()
            left -= 1
            if left < 0:
                await anyio.sleep_forever()
            sys.stdout.write("played\n")
            sys.stdout.flush()
            return float(len(reply.json()["choices"][0]["message"]["content"]))

        result = await loop(
            client,
            "tictactoe",
            SCENARIOS,
            play,
            LoopOptions(
                "night",
                steps=1,
                groups_per_step=1000,
                group_size=GROUP_SIZE,
                concurrency=CONCURRENCY,
                epochs=1,
                describe=str,
                tries=5,
            ),
        )
    told = {"played": result.played, "resumed": result.resumed, "incomplete": result.incomplete}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    anyio.run(main)
