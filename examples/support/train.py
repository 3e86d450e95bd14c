"""Takes a support agent from production, through rehearsals, to a better version in production.

    python -m examples.support.train --seed 0 --run-dir runs/support-0

1. In production: customers are answered by the base model, to which the model's name is pinned. Each call is recorded.
2. In rehearsal: the tickets are read from the history and answered eight times each by the newest version; a judge with
   the desk's rubric compares the replies, and the trainer learns from it. No customer gets one of these replies.
3. Compared: the base model and the last version answer the same held-out tickets.
4. Promoted: if the interval of the difference lies above 0, the last version gets a fifth of the customers, then all.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from examples.common import curve, running, stand_in
from examples.common.running import CONCURRENCY, GROUP_SIZE, GROUPS_PER_STEP
from examples.support import history
from examples.support.desk import SYSTEM, keeps_all_rules, score, ticket
from journeywork import AsyncJourneywork, Trajectory

MODEL = "support"
BASE = None  # the tiny model of make_model; a real one: BASE = "/models/Qwen3-4B-Instruct-2507"
JUDGE: dict[str, Any] = {}  # the stand-in; a judge model: JUDGE = {"judge.model": "openai/gpt-5-mini"}
CUSTOMERS = 60
"""Customers before the training, and again after each decision."""
SETTINGS = {"judge.rubric": str(Path(__file__).with_name("rubric.md"))}


async def reply(run: Trajectory, text: str) -> str:
    """Ask the model for the reply to a ticket."""
    agent = running.agent(run)
    answer = await agent.chat.completions.create(
        model=MODEL,
        max_tokens=24,
        temperature=1.0,
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
    )
    return answer.choices[0].message.content or ""


async def answer(run: Trajectory, text: str) -> float:
    """Answer one ticket. Returns 1 if the reply keeps all rules, else 0."""
    share = float(keeps_all_rules(text, await reply(run, text)))
    run.metrics = {"all_rules": share}
    return share


async def rehearse(run: Trajectory, text: str) -> None:
    """A training run: its reward is the judge's."""
    await answer(run, text)


async def serve_customers(client: AsyncJourneywork, args: argparse.Namespace, shift: str) -> None:
    """Answer customers by whatever version the model's name stands for. Their runs are recorded and never trained."""
    limiter = anyio.CapacityLimiter(CONCURRENCY)

    async def serve(text: str) -> None:
        async with limiter, client.trajectory(MODEL, task=text) as run:
            await answer(run, text)
            run.outcome = "masked"

    async with anyio.create_task_group() as tg:
        for number in range(CUSTOMERS):
            tg.start_soon(serve, ticket(f"customer/{args.seed}/{shift}/{number}").text)


async def rehearsals(client: AsyncJourneywork, args: argparse.Namespace) -> None:
    """Answer the customers' tickets again, in groups, with the newest version, until the last step is served."""
    written = {ticket(f"customer/{args.seed}/before/{n}").text for n in range(CUSTOMERS)}
    texts = await history.recorded_tickets(args.run_dir, written)
    number = 0
    while (newest := await running.newest_version(client, MODEL)) != f"{MODEL}@{args.steps}":
        drawn = [texts[(number + n) % len(texts)] for n in range(GROUPS_PER_STEP)]
        await client.gather(
            MODEL, drawn, rehearse, describe=str, group_size=GROUP_SIZE, concurrency=CONCURRENCY, pinned=newest
        )
        number += GROUPS_PER_STEP


async def decide(args: argparse.Namespace, *decision: str) -> None:
    """Run `journeywork policy`, which puts the decision on the log."""
    command = [running.JOURNEYWORK, "policy", *decision, "--run-dir", str(args.run_dir), "--by", "examples.support"]
    await anyio.to_thread.run_sync(lambda: subprocess.run(command, check=True))


async def main() -> None:
    args = running.arguments(__doc__, MODEL, steps=24, held_out=400, base=BASE)
    with stand_in.judge_settings(JUDGE, score) as judge:
        async with running.installation(args, SETTINGS | judge) as client:
            base, last = f"{MODEL}@0", f"{MODEL}@{args.steps}"
            await decide(args, "pin", base, "--reason", "in production")
            await serve_customers(client, args, "before")
            await rehearsals(client, args)
            held_out = [ticket(f"val/{n}").text for n in range(args.held_out)]
            compared = await client.evaluate([base, last], held_out, answer, concurrency=CONCURRENCY)
            difference = compared.difference(1, "reward")
            if difference.low > 0:
                await decide(args, "split", last, base, "--percent", "20", "--reason", f"{difference}")
                await serve_customers(client, args, "split")
                await decide(args, "promote", last, "--reason", "the customers of the split had no complaint")
            await serve_customers(client, args, "after")
    curve.report(args, compared, metric="all_rules")
    print(history.answered_by(args.run_dir))


if __name__ == "__main__":
    anyio.run(main)
