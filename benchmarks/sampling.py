"""Sampled tokens per second through the gateway with an adapter, against vLLM alone with the base model.

    python -m examples.inbox.demo --run-dir runs/demo
    python -m benchmarks.sampling runs/demo [--rounds 4]

Continues the installation of an ended demo without its trainer. In turn, for `--seconds` each, the same callers ask for
the same prompts and numbers of tokens: `vllm` asks vLLM for the base model, `adapter` asks it for the newest adapter,
`gateway` asks the gateway, in runs of which each call is on the log. Writes benchmarks/results/sampling.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai

from benchmarks.bench import RESULTS, machine, write_results
from examples.common.running import Installation, served_step
from examples.inbox import demo
from examples.inbox.messages import message
from journeywork import AsyncJourneywork

CALLERS = 32
TOKENS = 24
"""Sampled tokens of each call."""
OPTIONS: dict[str, Any] = {"temperature": 1.0, "max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}

Call = Callable[[int], Awaitable[None]]


async def tokens_per_s(call: Call, seconds: float) -> float:
    """Let the callers call one after the other for `seconds`. Returns the sampled tokens per second of the calls that
    ended in this time."""
    ended, number = 0, 0
    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as tasks:

            async def caller() -> None:
                nonlocal ended, number
                while True:
                    number += 1
                    await call(number)
                    ended += 1

            for _ in range(CALLERS):
                tasks.start_soon(caller)
    return ended * TOKENS / seconds


async def measure(run_dir: Path, up: Installation, args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampled tokens per second of the three sides, over `args.rounds` rounds."""
    async with AsyncExitStack() as opened:
        client = await opened.enter_async_context(AsyncJourneywork(await up.ready()))
        adapter = f"{demo.MODEL}@{await served_step(client, demo.MODEL)}"
        (url,) = json.loads((run_dir / "state.json").read_text())["urls"]["vllm"]
        key = (run_dir / "keys" / "vllm.key").read_text().strip()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        http = httpx.AsyncClient(limits=limits, timeout=120)
        vllm = await opened.enter_async_context(
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=http, max_retries=0)
        )
        served = {entry.id for entry in (await vllm.models.list()).data}
        base = f"{demo.MODEL}@0"
        if missing := {base, adapter} - served:
            raise SystemExit(f"vLLM serves {', '.join(sorted(served))}, and not {', '.join(sorted(missing))}")

        def at_vllm(model: str) -> Call:
            """Return a function that makes a call to vLLM itself."""

            async def call(number: int) -> None:
                prompt: Any = message("train", number % 512, 0).prompt
                await vllm.chat.completions.create(model=model, messages=prompt, **OPTIONS)

            return call

        async def at_gateway(number: int) -> None:
            """Play a run of one call to the adapter through the gateway."""
            prompt: Any = message("train", number % 512, 0).prompt
            async with client.trajectory(demo.MODEL, split="val", pinned=adapter) as run:
                agent = vllm.with_options(base_url=run.base_url, api_key=run.api_key)
                await agent.chat.completions.create(model=demo.MODEL, messages=prompt, **OPTIONS)
                run.reward = 0.0

        sides: dict[str, Call] = {"vllm": at_vllm(base), "adapter": at_vllm(adapter), "gateway": at_gateway}
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(args.rounds + 1):
            for side, call in sides.items():
                rate = await tokens_per_s(call, args.seconds if number else 5.0)
                if number:  # the first round warms up
                    rates[side].append(rate)
    medians = {side: statistics.median(values) for side, values in rates.items()}
    return {
        "callers": CALLERS,
        "tokens_a_call": TOKENS,
        "tokens_per_s": {side: round(value, 1) for side, value in medians.items()},
        "rounds": rates,
        "gateway_against_vllm": round(medians["gateway"] / medians["vllm"], 3),
        "gateway_against_adapter": round(medians["gateway"] / medians["adapter"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="run directory of a demo that has ended")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0, help="time of a side in a round")
    parser.add_argument("--out", type=Path, default=RESULTS / "sampling.json")
    args = parser.parse_args()
    run_dir = args.run_dir.absolute()
    settings = demo.settings_of(demo.parse_args([]))
    with Installation(run_dir, demo.SETTINGS, settings, "--services", "gateway,sampler,store") as up:
        figures = anyio.run(measure, run_dir, up, args)
    write_results(args.out, machine() | figures)


if __name__ == "__main__":
    main()
