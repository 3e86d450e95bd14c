"""The second half of `make apprentice`: the apprentice works unseen beside the master, and takes its runs over by
evidence. The agents go on naming the master."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from examples.common.curve import as_svg
from examples.common.history import rows
from examples.common.running import JOURNEYWORK, ROOT, ExampleError, Installation
from examples.inbox import demo
from examples.inbox.agent import MODEL, Sorter
from examples.inbox.messages import message
from examples.inbox.report import say
from journeywork import AsyncJourneywork

MASTER = "master"
FROM = 2 * demo.EXAMPLES_FROM
"""Number of the first message of this half: no version was trained on one of these."""
AT_MOST = 6_000
"""More messages than this half needs."""
SHADOWED, ROUND, AFTER = 240, 96, 300
"""Messages about which both are asked, of each round until the decision, and after it."""
MARGIN = 0.1
"""By how much the mean share of right fields may be worse."""
QUALITY = 0.85
"""The apprentice's answers are shown where they agree with the master's with this probability."""
SHADOWS = """SELECT count(*) AS n, avg(as_good::INT) AS agreement, mode(policy_version) AS version,
  count(*) FILTER (NOT same AND outside_score IS NULL) AS unjudged FROM shadows"""
PAIRS = "SELECT mean_logprob, as_good FROM shadows WHERE policy_version = '{version}'"
GUARDS = ("cost_usd:0:0.0005:higher:0", "calls_s:0:60:higher:10")
EVIDENCE = (
    f"""SELECT evidence FROM policy_promoted WHERE model = '{MASTER}' AND action = 'promote' ORDER BY "at" DESC"""
)
WORK = f"""SELECT sum(calls) AS calls, sum(apprentice_calls) AS of_apprentice, sum(unsure_calls) AS unsure,
  count(*) AS runs, sum(cost_usd) / count(*) AS usd, avg(reward) AS reward
FROM takeovers WHERE model = '{MASTER}' AND epoch(opened_at) >= {{since}}"""
OVER_TIME = f"""SELECT epoch(time_bucket(INTERVAL 10 SECOND, opened_at)) AS s,
  sum(apprentice_calls) / sum(calls) AS share, sum(cost_usd) / count(*) AS usd
FROM takeovers WHERE model = '{MASTER}' AND epoch(opened_at) >= {{since}} GROUP BY 1 HAVING sum(calls) > 0 ORDER BY 1"""
_SETTLE_S = 120.0
"""Longest time to wait for the store to write what was recorded."""


async def _read(run_dir: Path, query: str, enough: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the row of a query once `enough(row)` is true, or after `_SETTLE_S` as it is then: the store writes every
    few seconds."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        (row,) = await anyio.to_thread.run_sync(rows, run_dir, query)
        if enough(row) or time.monotonic() > deadline:
            return row
        await anyio.sleep(2)


async def _decide(run_dir: Path, *command: str) -> str:
    """Run `journeywork decide`, and return what it printed. Raises `ExampleError` if it fails."""
    done = await anyio.run_process([JOURNEYWORK, "decide", *command, "--run-dir", str(run_dir)], cwd=ROOT, check=False)
    if done.returncode:
        raise ExampleError(f"journeywork decide {command[0]} failed:\n{done.stderr.decode()[-3000:]}")
    return done.stdout.decode()


async def take_over(version: str, args: argparse.Namespace, up: Installation) -> dict[str, Any]:
    """Compare `version` with the master unseen, let it take over, and return the figures of the report."""
    run_dir, began, played = up.run_dir, time.time(), 0
    async with AsyncJourneywork(await up.ready()) as client:

        async def sort_messages(count: int) -> None:
            """Have agents sort the next `count` messages of the inbox; their calls name the master."""
            nonlocal played
            numbers = range(FROM + played, FROM + played + count)
            played += count
            messages = [message("train", number, args.seed) for number in numbers]
            options: dict[str, Any] = {"concurrency": demo.CONCURRENCY, "progress": False, "name": lambda m: m.id}
            await client.gather(MASTER, messages, Sorter().rollout(training=False), group_size=1, **options)

        say(f"the master sorts {SHADOWED} messages, and {version} unseen beside it")
        await sort_messages(SHADOWED)
        shadows = await _read(run_dir, SHADOWS, lambda row: row["n"] >= SHADOWED and not row["unjudged"])
        if not shadows["n"]:
            raise ExampleError(f"{version} answered no shadow call within {_SETTLE_S:g} s: see the gateway's log")
        version = shadows["version"]  # the trainer may have made another one after the last evaluation
        say(f"its answer is as good in {shadows['agreement']:.1%} of {shadows['n']} messages: journeywork decide")
        plan = [arg for guard in GUARDS for arg in ("--guard", guard)]
        plan += ["--metric", "reward", "--margin", str(MARGIN), "--steps", "5,25", "--deadline", "60"]
        cascade = ["--quality", str(QUALITY), "--pairs", PAIRS.format(version=version)]
        begin = ("begin", version, f"outside:{MASTER}", *plan)
        try:
            print(await _decide(run_dir, *begin, *cascade), flush=True)
        except ExampleError as error:
            if "no logprob keeps" not in str(error):
                raise
            say(f"how sure the apprentice is does not tell which {QUALITY:.0%} agree: all its answers are shown")
            print(await _decide(run_dir, *begin), flush=True)

        async def watch(sorting: anyio.CancelScope) -> None:
            """Wait for the decision, then stop the sorting of messages."""
            print(await _decide(run_dir, "watch", MASTER, "--every", "5"), flush=True)
            sorting.cancel()

        with anyio.move_on_after(args.take_over_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch, tasks.cancel_scope)
                while True:
                    await sort_messages(ROUND)
        decided = time.time()
        say(f"the agents sort {AFTER} messages more")
        await sort_messages(AFTER)
        work = await _read(run_dir, WORK.format(since=decided), lambda row: row["runs"] >= AFTER)
    over_time = [
        {"s": round(row["s"] - began, 1), "share": row["share"], "usd_per_task": row["usd"]}
        for row in rows(run_dir, OVER_TIME.format(since=began))
    ]
    (run_dir / "takeover.svg").write_text(draw(over_time), "utf-8")
    return {
        "shadow": {"agreement": shadows["agreement"], "n": shadows["n"]},
        "decision": _decision(run_dir),
        "share": work["of_apprentice"] / work["calls"],
        "unsure": work["unsure"] / work["runs"],
        "reward_after": work["reward"],
        "usd_after": work["usd"],
        "over_time": over_time,
    }


def _decision(run_dir: Path) -> dict[str, Any]:
    """Return the recorded decision, with the interval of the difference that it rests on; the verdict `continue` if
    there is none."""
    recorded = [json.loads(row["evidence"]) for row in rows(run_dir, EVIDENCE) if row["evidence"]]
    if not recorded:
        return {"verdict": "continue"}
    evidence, metric = recorded[0], recorded[0]["findings"][0]
    version = evidence["candidate"] if evidence["verdict"] == "promote" else evidence["control"]
    return {
        "verdict": evidence["verdict"],
        "version": version,
        "shares": [share["percent"] for share in evidence["shares"]],
        "margin": MARGIN,
        "cascade": evidence["plan"]["cascade"],
        "difference": {name: metric[name] for name in ("difference", "low", "high", "pairs")},
    }


def draw(over_time: list[dict[str, Any]]) -> str:
    """Return a picture of the apprentice's share of the calls, and of the money for a task, over time, as SVG."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(4.2, 2.6), dpi=100, layout="constrained")
    at = [row["s"] for row in over_time]
    axes.plot(at, [row["share"] for row in over_time], color="tab:blue", label=f"share of calls answered by {MODEL}")
    axes.set(xlabel="seconds", ylim=(-0.03, 1.03))
    money = axes.twinx()
    cents = [100 * row["usd_per_task"] for row in over_time]
    money.plot(at, cents, color="tab:orange", label="cents for a task")
    money.set_ylim(0, 1.1 * max(cents, default=1.0) or 1.0)
    axes.legend(loc="center left", fontsize=8)
    money.legend(loc="center right", fontsize=8)
    return as_svg(figure)
