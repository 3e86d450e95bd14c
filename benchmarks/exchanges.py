"""Benchmark of exchanges on the log, whole and as what follows an earlier one: `python -m benchmarks.exchanges` writes
benchmarks/results/exchanges.json.

Runs of `--turns` calls are recorded as a gateway records them, against two NATS servers in turn: one gets whole
exchanges (`nats.exchange_memory_bytes = 0`, what the log held before), the other one what follows. Each turn adds a
reply and a tool's result; the system prompt is there from the beginning.

    bytes_per_run             bytes of exchanges in the stream, as its byte limit counts them
    disk_bytes_per_run        size of the stream's files, which the server compresses
    ratio, disk_ratio         whole over what follows
    cpu_us_per_call           CPU time of the recording process per call; the median of `--pairs` pairs of batches
    cpu_ratio                 median over the pairs of: what follows over whole
    server_cpu_us_per_call    CPU time of the NATS server per call
    read_us_per_call          time of a fresh reader for whole exchanges of whole runs
    small_...                 the same for exchanges of 3 KB, which are always whole
    equal_sequences           whether both logs give the same training sequences, bit for bit
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import psutil

from pipeline.config import NatsConfig
from pipeline.events import ExchangeRecorded, TrajectoryOpened, pack_ids, pack_logprobs
from pipeline.log.broker import Broker
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.registry import Registry
from tests.conftest import NatsServer
from trainer.batches.sequences import TokenSequence, build

RESULT = Path(__file__).parent / "results" / "exchanges.json"
_RNG = np.random.default_rng(7)
_WORDS = ["".join(map(chr, _RNG.integers(97, 123, _RNG.integers(2, 8)))) for _ in range(5_000)]


@dataclass
class Sizes:
    """Tokens (about 5.5 characters each) of the parts of a conversation."""

    turns: int
    system: int = 1_500
    reply: int = 120
    result: int = 300


def _text(ids: Sequence[int]) -> str:
    return " ".join(_WORDS[i] for i in ids)


class Call:
    """A call as `Trajectory.record` takes it."""

    traceparent = ""

    def __init__(self, exchange: ExchangeRecorded) -> None:
        self._exchange = exchange

    def events(self, seq: int) -> list[ExchangeRecorded]:
        return [msgspec.structs.replace(self._exchange, seq=seq)]


def conversation(trajectory: str, sizes: Sizes, rng: np.random.Generator) -> list[Call]:
    """A run in which every call repeats what was said before it."""

    def ids(count: int) -> list[int]:
        return [int(i) for i in rng.integers(0, len(_WORDS), count)]

    prompt = ids(sizes.system)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": _text(prompt[: len(prompt) // 2])},
        {"role": "user", "content": _text(prompt[len(prompt) // 2 :])},
    ]
    calls = []
    for seq in range(sizes.turns):
        reply = ids(sizes.reply)
        message = {"role": "assistant", "content": _text(reply)}
        answer = {
            "id": f"chatcmpl-{trajectory}-{seq}", "object": "chat.completion", "created": 1_790_000_000, "model": "m@3",
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(reply)},
        }  # fmt: skip
        body = {"model": "m", "messages": messages, "temperature": 1.0, "max_tokens": 512}
        calls.append(
            Call(
                ExchangeRecorded(
                    project="bench", trajectory=trajectory, seq=seq, model="m", policy_version="m@3", step=3, group="g",
                    request=json.dumps(body).encode(), response=json.dumps(answer).encode(),
                    prompt_ids=pack_ids(prompt), sampled_ids=pack_ids(reply),
                    logprobs=pack_logprobs(rng.normal(-1, 0.3, len(reply))), finish_reason="stop",
                    request_hash=rng.bytes(32).hex(), replica="127.0.0.1:8000", started_at=1_790_000_000_000_000 + seq,
                    at=1_790_000_001_000_000 + seq,
                )
            )
        )  # fmt: skip
        result = ids(sizes.result)
        prompt = prompt + reply + result
        messages = [*messages, message, {"role": "tool", "content": _text(result)}]
    return calls


@dataclass
class Side:
    """One of the two logs."""

    server: NatsServer
    broker: Broker
    cpu: list[float] = field(default_factory=list)
    server_cpu: list[float] = field(default_factory=list)

    async def record(self, runs: Sequence[tuple[str, list[Call]]], at_once: int) -> None:
        registry = Registry(self.broker, "bench", TrajectoryTokens(b"0" * 32, "bench"))
        opened = [
            await registry.open(TrajectoryOpened(project="bench", trajectory=name, model="m", group="g"), "")
            for name, _ in runs
        ]
        assert self.server.process is not None
        process = psutil.Process(self.server.process.pid)
        before, began = sum(process.cpu_times()[:2]), time.process_time()
        limit = anyio.CapacityLimiter(at_once)

        async def one(number: int) -> None:
            async with limit:
                for call in runs[number][1]:
                    await opened[number].record(call)

        async with anyio.create_task_group() as tg:
            for number in range(len(runs)):
                tg.start_soon(one, number)
        calls = sum(len(made) for _, made in runs)
        self.cpu.append((time.process_time() - began) / calls * 1e6)
        self.server_cpu.append((sum(process.cpu_times()[:2]) - before) / calls * 1e6)

    async def bytes(self) -> int:
        return int((await self.broker.js.stream_info("ROLLOUTS")).state.bytes)

    def disk(self) -> int:
        """Bytes of the stream's files. The server compresses a file when it begins the next one."""
        return sum(
            f.stat().st_size for f in (self.server.folder / "js").rglob("*.blk") if "ROLLOUTS" in str(f)
        )

    async def read(self, names: Sequence[str]) -> tuple[list[TokenSequence], float]:
        sequences: list[TokenSequence] = []
        took = 0.0
        async with Broker.connect(self.broker.config, provision=False) as reader:
            for name in names:
                began = time.perf_counter()
                found = await reader.read(ExchangeRecorded, project="bench", trajectory=name)
                took += time.perf_counter() - began
                sequences += build(name, [r.event for r in found])
        return sequences, took


def _equal(one: TokenSequence, two: TokenSequence) -> bool:
    names = ("ids", "loss_mask", "logprobs", "steps", "temperatures")
    return all(np.array_equal(getattr(one, n), getattr(two, n), equal_nan=n == "logprobs") for n in names)


async def measure(folder: Path, sizes: Sizes, pairs: int, runs: int) -> dict[str, Any]:
    """Record `pairs` batches of `runs` runs on each of two logs, in turn."""
    rng = np.random.default_rng(3)
    async with AsyncExitStack() as stack:
        sides = []
        for name, memory in (("whole", 0), ("follows", 268_435_456)):
            (folder / name).mkdir(parents=True)
            server = NatsServer(folder / name)
            server.start()
            stack.callback(server.stop)
            config = NatsConfig(url=server.url, exchange_memory_bytes=memory)
            sides.append(Side(server, await stack.enter_async_context(Broker.connect(config))))
        whole, follows = sides
        names: list[str] = []
        empty = [await side.bytes() for side in sides]
        for number in range(pairs + 1):
            batch = [(f"t{number}-{i}", conversation(f"t{number}-{i}", sizes, rng)) for i in range(runs)]
            names += [name for name, _ in batch]
            for side in sides if number % 2 else reversed(sides):
                await side.record(batch, 8)
        sizes_now = [await side.bytes() - before for side, before in zip(sides, empty, strict=True)]
        (one, one_s), (two, two_s) = await whole.read(names), await follows.read(names)
        equal = len(one) == len(two) and all(_equal(a, b) for a, b in zip(one, two, strict=True))
        calls = len(names) * sizes.turns
        out: dict[str, Any] = {
            "calls": calls,
            "equal_sequences": equal,
            "ratio": sizes_now[0] / sizes_now[1],
            "disk_ratio": whole.disk() / follows.disk(),
            # The first pair warms up.
            "cpu_ratio": statistics.median(
                f / w for w, f in zip(whole.cpu[1:], follows.cpu[1:], strict=True)
            ),
        }
        reads = (one_s, two_s)
        for name, side, size, read_s in zip(("whole", "follows"), sides, sizes_now, reads, strict=True):
            out |= {
                f"{name}_bytes_per_run": size / len(names),
                f"{name}_disk_bytes_per_run": side.disk() / len(names),
                f"{name}_cpu_us_per_call": statistics.median(side.cpu[1:]),
                f"{name}_server_cpu_us_per_call": statistics.median(side.server_cpu[1:]),
                f"{name}_read_us_per_call": read_s / calls * 1e6,
            }
        return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--runs", type=int, default=16, help="runs in a batch")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    out: dict[str, Any] = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "python": platform.python_version(),
        "cores": os.cpu_count(), "load_before": os.getloadavg()[0], "turns": args.turns, "pairs": args.pairs,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bench-exchanges-") as folder:
        out |= anyio.run(measure, Path(folder) / "long", Sizes(args.turns), args.pairs, args.runs)
        small = anyio.run(
            measure, Path(folder) / "small", Sizes(1, 250, 60, 0), args.pairs, args.turns * args.runs
        )
        out |= {f"small_{k}": v for k, v in small.items() if "cpu" in k or k == "ratio"}
    out = {k: round(v, 4) if isinstance(v, float) else v for k, v in out.items()}
    args.out.write_text(json.dumps(out, indent=2) + "\n")
    print(json.dumps(out, indent=2))


if __name__ == "__main__":
    main()
