"""Preference training on the history of another run: DPO on the games of a demo, from the base model.

    make demo
    python -m examples.tictactoe.preferences --history runs/demo --run-dir runs/preferences

The pairs are games of the same opening that went differently (`journeywork dataset --as dpo`), the step is one of
`journeywork train --on`. The same held-out games are played with the base model and with the result; win rates and
their difference go to `<run-dir>/report.json`."""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio

from examples.common.running import JOURNEYWORK, Installation, make_room, newest_version
from examples.tictactoe import held_out
from examples.tictactoe.demo import SETTINGS
from examples.tictactoe.report import MODEL
from journeywork import AsyncJourneywork, evaluation

RUNS = "SELECT trajectory FROM trajectories WHERE split = 'train' AND outcome = 'scored'"
SERVICES = "gateway,sampler,judge,store,ui"
"""All but the trainer, whose place the command takes."""


async def play(args: argparse.Namespace, data: Path, up: Installation) -> dict[str, Any]:
    async with AsyncJourneywork(await up.ready()) as client:
        train = [
            JOURNEYWORK, "train", "--run-dir", str(up.run_dir), "--on", str(data), "--as", "dpo",
            "--learning-rate", str(args.learning_rate), "--epochs", str(args.epochs), "--batch-size", "64",
            "--max-length", "256",
        ]  # fmt: skip
        await anyio.run_process(train, stdout=None, stderr=None)
        while await newest_version(client, MODEL) != f"{MODEL}@1":
            up.check()
            await anyio.sleep(0.5)
        report = await evaluation.play(
            client, [f"{MODEL}@0", f"{MODEL}@1"], held_out.batches(args.held_out), held_out.play,
            concurrency=held_out.AT_ONCE, progress=False,
        )  # fmt: skip
    return {
        "pairs": len((data / "train.jsonl").read_text("utf-8").splitlines()),
        "held_out_games": args.held_out,
        "win_rate": [asdict(entrant.estimate("win")) for entrant in report.entrants],
        "less_base": asdict(report.difference(1, "win")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--history", type=Path, required=True, help="run directory of the demo that is learned from"
    )
    parser.add_argument("--run-dir", type=Path, default=Path("runs/preferences"))
    parser.add_argument("--held-out", type=int, default=held_out.GAMES, help="number of held-out games")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    run_dir = args.run_dir.absolute()
    make_room(run_dir)
    data = run_dir.with_name(f"{run_dir.name}-pairs")
    make_room(data)
    export = ["dataset", RUNS, "--as", "dpo", "--out", str(data), "--run-dir", str(args.history)]
    subprocess.run([JOURNEYWORK, *export], check=True)
    up = Installation(run_dir, SETTINGS, {}, "--services", SERVICES)
    try:
        report = {"learning_rate": args.learning_rate, **anyio.run(play, args, data, up)}
    finally:
        up.stop()
    (run_dir / "report.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
