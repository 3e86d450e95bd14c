"""A long run of the whole installation at a steady rate: `python -m benchmarks.soak --seconds 10800` writes
benchmarks/results/soak.json.

`journeywork up` runs with real services before `tests.kits.inference_double`, which samples without a model. Agents
open groups of four runs, make one call each and complete them, `--rate` runs a second. One group in `--trained-every`
has rewards that differ, so the trainer trains it; the others are discarded.

    rate         runs a second that were completed; at most eight groups wait for answers, so a slow machine has less
    memory_mb    of each service, the mean resident memory in each eighth of the run; beside it the most
    runs, calls  what the agents completed, and what `journeywork sql` counts afterwards: they must be equal
    failed       requests that did not succeed
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import anyio
import httpx
import psutil

from tests.kits.installation import SMALL, Up, up

RESULT = Path(__file__).parent / "results" / "soak.json"
GROUP = 4
_SAMPLE_S = 5.0
_PARTS = 8
_OPEN_GROUPS = 8


class Agents:
    """Groups of runs at a rate."""

    def __init__(self, url: str, rate: float, trained_every: int) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=64))
        self._rate, self._trained_every = rate, trained_every
        self.completed = self.failed = 0

    async def run(self, group: int, attempt: int) -> None:
        opened = await self._post(
            "/v1/trajectories", {"model": "tictactoe", "group": f"g{group}", "attempt": attempt}
        )
        if opened is None:
            return
        body = {
            "model": "tictactoe",
            "messages": [{"role": "user", "content": f"{group % 97}"}],
            "max_tokens": 8,
        }
        if await self._post(f"{opened['base_url']}/chat/completions", body, opened["api_key"]) is None:
            return
        reward = float(attempt % 2) if group % self._trained_every == 0 else 0.0
        if await self._post(f"/v1/trajectories/{opened['id']}/complete", {"reward": reward}) is not None:
            self.completed += 1

    async def _post(self, path: str, body: dict[str, object], key: str = "none") -> dict[str, str] | None:
        try:
            reply = await self._client.post(path, json=body, headers={"authorization": f"Bearer {key}"})
            reply.raise_for_status()
        except httpx.HTTPError as error:
            self.failed += 1
            print("failed:", path, repr(error), flush=True)
            return None
        answer: dict[str, str] = reply.json()
        return answer

    async def work(self, seconds: float) -> None:
        end, group = time.monotonic() + seconds, 0
        open_groups = anyio.Semaphore(_OPEN_GROUPS)

        async def play(group: int) -> None:
            async with anyio.create_task_group() as runs:
                for attempt in range(GROUP):
                    runs.start_soon(self.run, group, attempt)
            open_groups.release()

        async with self._client, anyio.create_task_group() as tg:
            due = time.monotonic()
            while time.monotonic() < end:
                await open_groups.acquire()
                tg.start_soon(play, group)
                group, due = group + 1, max(due + GROUP / self._rate, time.monotonic())
                await anyio.sleep(max(0.0, due - time.monotonic()))


async def watch(installation: Up, memory: dict[str, list[float]]) -> None:
    """Append the resident memory of each service in MB, every 5 s."""
    while True:
        await anyio.sleep(_SAMPLE_S)
        for name, service in json.loads((installation.run_dir / "state.json").read_text())[
            "services"
        ].items():
            try:
                memory[name].append(psutil.Process(service["pid"]).memory_info().rss / 1e6)
            except psutil.NoSuchProcess:
                print(f"{name} is being restarted", flush=True)


async def measure(installation: Up, options: argparse.Namespace) -> dict[str, object]:
    memory: dict[str, list[float]] = defaultdict(list)
    agents = Agents(installation.url, options.rate, options.trained_every)
    async with anyio.create_task_group() as tg:
        tg.start_soon(watch, installation, memory)
        await agents.work(options.seconds)
        tg.cancel_scope.cancel()
    parts = {
        name: [
            round(statistics.mean(samples[len(samples) * i // _PARTS : len(samples) * (i + 1) // _PARTS]), 1)
            for i in range(_PARTS)
        ]
        for name, samples in memory.items()
    }
    return {
        "seconds": options.seconds,
        "rate": round(agents.completed / options.seconds, 1),
        "runs": agents.completed,
        "failed": agents.failed,
        "memory_mb": parts,
        "memory_mb_max": {name: round(max(samples), 1) for name, samples in memory.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10_800)
    parser.add_argument("--rate", type=float, default=60, help="runs a second")
    parser.add_argument("--trained-every", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        flags = ("--run-dir", str(run_dir), "--set", "models.0.name=tictactoe")
        flags += ("--set", "models.0.base=examples/tictactoe/model")
        settings = (
            *SMALL,
            f"judge.group_size={GROUP}",
            "gateway.max_groups_ahead=0",
            "trainer.groups_per_step=2",
        )
        with up(Path(folder), run_dir, *flags, settings=settings) as installation:
            result = anyio.run(measure, installation, options)
            installation.stop()
            (counted,) = installation.query(
                "SELECT count(*) AS runs, count(DISTINCT trajectory) AS different, "
                "(SELECT count(*) FROM exchanges) AS calls, (SELECT max(step) FROM checkpoints) AS steps "
                "FROM trajectories WHERE completed_at IS NOT NULL"
            )
    RESULT.write_text(json.dumps(result | {"sql": counted}, indent=1) + "\n")
    print(json.dumps(result | {"sql": counted}))


if __name__ == "__main__":
    main()
