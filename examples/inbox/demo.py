"""`make demo`: a language model learns to sort a shop's inbox, on this machine.

    python -m examples.inbox.demo --seed 0 --run-dir runs/demo

1. A warm start: supervised training on a few dozen examples, one step of the installation's history.
2. Base model and warm start answer the held-out messages, whose sentences are in no training message.
3. Agents sort messages while the trainer trains. The reward is the share of right fields, or as `examples.inbox.ways`
   describes for `--way judge` and `--way job`.
4. The last version answers the held-out messages. The history is checked, and `<run-dir>/report.json` is written.

Exits with 1 if the run failed, or if its history holds what it must not.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from examples.common import packaged, running
from examples.inbox import report
from examples.inbox.agent import MODEL, Sorter
from examples.inbox.messages import Message, message
from examples.inbox.ways import GROUP_SIZE, GROUPS_PER_STEP, MESSAGES, Way, way_of
from journeywork import AsyncJourneywork, EvaluationReport, LoopOptions
from journeywork.evaluation.results import EntrantResult

SETTINGS = Path(__file__).with_name("journeywork.toml")
BASE, WARM = f"{MODEL}@0", f"{MODEL}@1"
WARM_START = "warm_start"
"""Folder of the run directory with the adapter of `WARM`."""
EXAMPLES = 72
"""Examples of the warm start."""
EXAMPLES_FROM = 100_000
"""Number of the first example. Training messages have smaller numbers."""
VLLM_ARGS = tomllib.loads(SETTINGS.read_text())["vllm"]["args"]
CONCURRENCY = 96
BASE_MESSAGES = 84
"""Held-out messages that the base model answers. It solves none, and its answers are the longest."""
SECONDS, SECONDS_IN_FLOAT32 = 845, 2250
"""When the steps end: the whole demo takes 15 minutes on two cores that multiply bfloat16."""
LOOK_EVERY_S = 10.0
SHOW_STEPS = 10
"""Steps between two looks at the answers to the same few held-out messages."""


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that this machine and the flags decide."""
    base = args.base or packaged.make()
    settings: dict[str, Any] = {
        "models.0.base": str(base.absolute()),
        "trainer.max_steps": args.steps + 1,
        "trainer.seed": args.seed,
    }
    if running.fast_bfloat16():
        return settings | {"trainer.dtype": "bfloat16", "vllm.args": [*VLLM_ARGS, "--dtype", "bfloat16"]}
    # In float32 a step computes longer than its answers take: the trainer has the inference server's core, too, where
    # that waits.
    return settings | {"trainer.threads": 2}


def tuning(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the flags of `journeywork train` for a supervised step."""
    return "--learning-rate", "1e-3", "--seed", str(args.seed), "--set", "trainer.threads=2"


def warm_start(run_dir: Path, settings: dict[str, Any], args: argparse.Namespace) -> None:
    """Train the base model on examples, by `journeywork train`. The result is the version `WARM`."""
    examples = [message("train", EXAMPLES_FROM + number, args.seed) for number in range(EXAMPLES)]
    rows = [{"messages": [*e.prompt, {"role": "assistant", "content": e.right}]} for e in examples]
    running.supervised_step(run_dir, SETTINGS, settings, running.flags(args), rows, "--epochs", "4", *tuning(args))
    # Retention deletes old checkpoints; benchmarks/peer.py begins with this one.
    (checkpoint,) = run_dir.glob("checkpoints/**/step-00000001")
    shutil.copytree(checkpoint, run_dir / WARM_START)


async def train(
    way: Way, client: AsyncJourneywork, sorter: Sorter, args: argparse.Namespace, up: running.Installation
) -> int:
    """Let agents sort messages until the last step is served or the time is over. Returns the step that is served."""
    last = args.steps + 1
    options: LoopOptions[Message] = LoopOptions(
        "train",
        steps=last,
        groups_per_step=GROUPS_PER_STEP,
        group_size=GROUP_SIZE,
        concurrency=CONCURRENCY,
        max_staleness=1,
        describe=lambda m: m.text,
    )
    messages = [message("train", number, args.seed) for number in range(MESSAGES)]
    shown = [message("held_out", number) for number in range(report.SHOWN)]

    async def watch(training: anyio.CancelScope) -> None:
        """Show the progress until the last step is served, which ends the training."""
        shown_at = 0
        while True:
            up.check()
            step = await running.served_step(client, MODEL)
            report.show_progress(sorter, step, last)
            if step == last:
                training.cancel()
            if step >= shown_at + SHOW_STEPS:
                shown_at = step
                version = f"{MODEL}@{step}"
                await client.gather(MODEL, shown, sorter.rollout(training=False), split="val", pinned=version)
                report.show_answers(sorter, [BASE, WARM, version])
            await anyio.sleep(LOOK_EVERY_S)

    with anyio.move_on_after(args.began + args.seconds - time.monotonic()):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch, tasks.cancel_scope)
            await way.play(client, sorter, messages, options)
            tasks.cancel_scope.cancel()
    return await running.served_step(client, MODEL)


async def play(way: Way, args: argparse.Namespace, up: running.Installation) -> tuple[EvaluationReport, Sorter]:
    """Evaluate the base model and the warm start, train, and evaluate the last version, on held-out messages. Returns a
    report with warm start, last version and base model, in this order, and the agents' records."""
    sorter, held_out = Sorter(), [message("held_out", number) for number in range(args.held_out)]
    async with AsyncJourneywork(await up.ready(), api_key=way.operator) as client:

        async def evaluate(
            version: str, messages: Sequence[Message] = held_out, baseline: EntrantResult | None = None
        ) -> EvaluationReport:
            """Let a version answer held-out messages, and compare it with `baseline`, if there is one."""
            whole = messages is held_out
            return await client.evaluate(
                [version],
                messages,
                sorter.rollout(training=False),
                concurrency=CONCURRENCY,
                progress=False,
                scenarios="held-out messages" if whole else f"the first {len(messages)} held-out messages",
                baseline=baseline,
            )

        first = held_out[:BASE_MESSAGES]
        report.say(f"the warm start answers {len(held_out)} held-out messages, the base model {len(first)} of them")
        (warm,) = (await evaluate(WARM)).entrants
        (base,) = (await evaluate(BASE, first)).entrants
        report.show_answers(sorter, [BASE, WARM])
        began = time.monotonic()
        step = await train(way, client, sorter, args, up)
        sorter.train_s = time.monotonic() - began
        if step < 2:
            raise running.ExampleError(f"no step was trained in {args.seconds:.0f} s; see {up.run_dir}/logs")
        report.say(f"{MODEL}@{step} answers the held-out messages")
        after = await evaluate(f"{MODEL}@{step}", baseline=warm)
        report.show_answers(sorter, [BASE, WARM, f"{MODEL}@{step}"])
        sorter.usage = up.usage()
    return dataclasses.replace(after, entrants=(*after.entrants, base)), sorter


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of messages, examples and trainer")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("--steps", type=int, default=60, help="steps of reinforcement learning")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS if running.fast_bfloat16() else SECONDS_IN_FLOAT32,
        help=f"they end when the demo has run for this time: {SECONDS}, or {SECONDS_IN_FLOAT32} where the processor "
        "does not multiply bfloat16",
    )
    parser.add_argument("--held-out", type=int, default=252, help="number of held-out messages")
    parser.add_argument(
        "--way", choices=("function", "judge", "job"), default="function", help="where rewards come from"
    )
    parser.add_argument(
        "--delay", type=float, default=60, help="with `--way job`: seconds from an answer to its result"
    )
    parser.add_argument("--words", action="store_true", help="with `--way job`: also words about wrong answers")
    parser.add_argument("--base", type=Path, help="folder of another small language model")
    running.add_flags(parser)
    args = parser.parse_args(argv, argparse.Namespace(began=time.monotonic()))
    if args.words and args.way != "job":
        parser.error("--words needs --way job: in the other ways nobody says anything about an answer")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    run_dir: Path = args.run_dir.absolute()
    with running.as_program(run_dir):
        settings = settings_of(args)
        running.make_room(run_dir)
        if not running.fast_bfloat16():
            report.say(
                f"this processor does not multiply bfloat16: training ends after {args.seconds / 60:.0f} minutes"
            )
        report.say(f"warm start: {EXAMPLES} examples")
        warm_start(run_dir, settings, args)
        with (
            way_of(args.way, args) as way,
            running.Installation(run_dir, SETTINGS, settings | way.settings, *running.flags(args)) as up,
        ):
            compared, sorter = anyio.run(play, way, args, up)
        report.conclude(compared, sorter, run_dir, args, time.monotonic() - args.began)


if __name__ == "__main__":
    main()
