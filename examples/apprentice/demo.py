"""`make apprentice`: from a provider's model to a model of one's own, on this machine.

    python -m examples.apprentice.demo --seed 0 --run-dir runs/apprentice

1. The agent sorts 300 messages of the inbox with the master, a provider's model at a price, through the gateway.
2. `journeywork apprentice` trains the small model on the best of these runs.
3. Agents sort further messages with the small model while the trainer trains it, as in `examples.inbox.demo`. The
   master corrects answers with less than half of the fields right, and the corrections that a judge finds better teach
   too (healing). The judge is a stand-in: a program that knows the right answers.
4. The small model works unseen beside the master, and takes its runs over by evidence, while the agents go on naming
   the master (`examples.apprentice.takeover`).

Master, first and last version of the apprentice answer the same held-out messages. The history is checked, and
`<run-dir>/report.json` has the quality of each, the decision, the share of calls that the apprentice answers at the
end, and the money for a task then and before. Exits with 1 if the run failed, or if its history holds what it must not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
from rich.table import Table

from examples.apprentice.takeover import AT_MOST, FROM, MASTER, take_over
from examples.common import running, stand_in
from examples.common.history import rows
from examples.common.invariants import count_findings, require_none
from examples.inbox import demo
from examples.inbox.agent import MODEL, Sorter
from examples.inbox.messages import message
from examples.inbox.report import console, figures, say
from examples.inbox.ways import MESSAGES, RUBRIC, Way, scoring
from journeywork import AsyncJourneywork
from journeywork.evaluation.results import EntrantResult

KEY_ENV = "MASTER_KEY"
RUNS = 300
"""Messages that the master sorts for the apprentice."""
RUNS_FROM = demo.EXAMPLES_FROM
"""Number of the first of them. Messages of reinforcement learning have smaller numbers."""
PRICES = {"input_usd": 2.5, "output_usd": 10.0}
HEALING = {"judge.healing.outside": MASTER, "trainer.distill.weight": 0.1, "judge.rubric": str(RUBRIC)}
"""Runs with a reward below 0.5, `judge.healing.below`, are healed."""
HEALED = """SELECT count(*) AS asked, count(*) FILTER (outside_score > apprentice_score) AS better,
  sum(outside_usd) AS usd,
  (SELECT count(*) FROM signals WHERE source = 'healing') AS corrections,
  (SELECT sum(metrics['hints'] - metrics['hints_unused']) FROM steps) AS trained
FROM rollout_compared WHERE outside_usd > 0"""
MONEY = "SELECT version, sum(cost_usd) / sum(runs) AS usd FROM costs GROUP BY version"


@contextlib.contextmanager
def master() -> Iterator[dict[str, Any]]:
    """Run the provider in a process of its own, and yield its table of the settings."""
    os.environ[KEY_ENV] = f"sk-{secrets.token_urlsafe(24)}"
    command = [sys.executable, "-m", "examples.apprentice.master"]
    # It ends with its stdin.
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=running.ROOT, start_new_session=True, **pipes) as provider:
        assert provider.stdout is not None
        url = provider.stdout.readline().strip()
        yield {"name": MASTER, "url": url, "model": "scripted-1", "api_key_env": KEY_ENV, "may_train": True, **PRICES}


async def work_with_master(args: argparse.Namespace, up: running.Installation) -> EntrantResult:
    """Let the master sort the apprentice's messages, and return its result on the held-out ones."""
    sort = Sorter().rollout(training=False)
    async with AsyncJourneywork(await up.ready()) as client:
        messages = [message("train", RUNS_FROM + number, args.seed) for number in range(RUNS)]
        options: dict[str, Any] = {"concurrency": demo.CONCURRENCY, "progress": False}
        await client.gather(MASTER, messages, sort, group_size=1, name=lambda m: m.id, **options)
        held_out = [message("held_out", number) for number in range(args.held_out)]
        compared = await client.evaluate([MASTER], held_out, sort, **options)
    return compared.entrants[0]


def conclude(
    scores: dict[str, EntrantResult], takeover: dict[str, Any], run_dir: Path, args: argparse.Namespace, seconds: float
) -> None:
    """Write and print the report: the `scores` of master, first and last version, and the result of `take_over`.
    `seconds`: of the whole demo. Raises `ExampleError` if the history holds what it must not."""
    sft, rl = scores["sft"], scores["rl"]
    money = {row["version"]: row["usd"] for row in rows(run_dir, MONEY)}
    findings = {name: count for name, count in count_findings(run_dir).items() if count}
    quality = {name: figures(result.estimate("solved")) for name, result in scores.items()}
    written = {
        "seed": args.seed,
        "quality": quality,
        "money_per_task": {"master": money[f"outside:{MASTER}"], "now": takeover["usd_after"]},
        "healing": rows(run_dir, HEALED)[0],
        **takeover,
        "versions": {"sft": sft.version, "rl": rl.version},
        "wall_s": round(seconds, 1),
        "findings": findings,
    }
    (run_dir / "report.json").write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    table = Table("", "answered by", "held-out messages solved", "95 % interval", "USD for a task")
    for (name, score), version in zip(quality.items(), (f"outside:{MASTER}", sft.version, rl.version), strict=True):
        low, high = score["ci95"]
        table.add_row(name, version, f"{score['value']:.3f}", f"{low:.3f} to {high:.3f}", f"{money[version]:.6f}")
    console.print(table)
    console.print(
        f"decision: {takeover['decision']['verdict']}; {MODEL} answers {takeover['share']:.1%} of the calls to "
        f"{MASTER}, which cost {100 * takeover['usd_after']:.4f} cents a task instead of "
        f"{100 * money[f'outside:{MASTER}']:.4f}\n"
        f"share and money over time: {run_dir / 'takeover.svg'}\n"
        f"{seconds:.0f} s in all, report: {run_dir / 'report.json'}"
    )
    require_none(findings)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of messages and trainer")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/apprentice"))
    parser.add_argument("--steps", type=int, default=40, help="steps of reinforcement learning")
    parser.add_argument("--seconds", type=float, default=1500, help="they end when the demo has run for this time")
    parser.add_argument("--take-over-s", type=float, default=400, help="longest time until the decision")
    parser.add_argument("--held-out", type=int, default=252, help="number of held-out messages")
    parser.add_argument("--base", type=Path, help="folder of another small language model")
    running.add_flags(parser)
    return parser.parse_args(argv, argparse.Namespace(began=time.monotonic()))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    run_dir: Path = args.run_dir.absolute()
    with running.as_program(run_dir):
        with master() as table:
            settings = {**demo.settings_of(args), "outside": [table]}
            running.make_room(run_dir)
            say(f"the master sorts {RUNS} messages and {args.held_out} held-out ones")
            services = ("--services", "gateway,judge,store")
            with running.Installation(run_dir, demo.SETTINGS, settings, *services, *running.flags(args)) as up:
                master_result = anyio.run(work_with_master, args, up)
            say(f"journeywork apprentice --runs {RUNS}")
            options = f"--runs {RUNS} --least 1 --test-share 0 -- --epochs 2".split()
            options += demo.tuning(args)
            print(running.run_command(run_dir, demo.SETTINGS, settings, running.flags(args), "apprentice", *options))
            settings["outside"] = [{**table, "apprentice": MODEL, "shadow_percent": 100.0}]
            numbers = (*range(MESSAGES), *range(FROM, FROM + AT_MOST))
            score = scoring(message("train", number, args.seed) for number in numbers)
            with stand_in.judging(score) as judge:
                settings |= judge | HEALING
                with running.Installation(run_dir, demo.SETTINGS, settings, *running.flags(args)) as up:
                    compared, _ = anyio.run(demo.play, Way("function"), args, up)
                    sft, rl, _ = compared.entrants
                    takeover = anyio.run(take_over, rl.version, args, up)
        scores = {"master": master_result, "sft": sft, "rl": rl}
        conclude(scores, takeover, run_dir, args, time.monotonic() - args.began)


if __name__ == "__main__":
    main()
