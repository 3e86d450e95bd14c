"""`journeywork train`: the trainer alone, on a log that runs elsewhere.

    journeywork train --config settings.toml --set nats.url=nats://host:4222
    journeywork train --run-dir runs/x --on data/good --as sft     one step on a data set, on the run's adapter
    journeywork train --run-dir runs/x --adopt 'runs/x#stricter/support@40'     go on from another branch's version
    journeywork train --run-dir runs/x --set trainer.branch=stricter --until-empty     what the branch holds

Every start resumes from the newest committed step, once no other trainer trains the branch. Ctrl-C stops it between
steps. Several GPUs: `torchrun … -m trainer` (`trainer.engine.parallel`).
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import anyio

from pipeline.config import Config, ConfigError
from pipeline.errors import leaves
from pipeline.log.broker import BrokerError
from pipeline.running.installations import installation_settings, log_of
from pipeline.running.service import until_signalled
from pipeline.running.state import read_state
from pipeline.telemetry import logs
from pipeline.terminal.parsers import command_parser
from pipeline.terminal.printing import visible
from trainer.checkpoints.commits import TrainerError
from trainer.commands import options
from trainer.first import import_first


def parser() -> argparse.ArgumentParser:
    made = command_parser("train", "Run the trainer alone.")
    options.add_installation_arguments(made)
    made.add_argument(
        "--until-empty", action="store_true", help="end once the log holds no more groups for a full step"
    )
    made.add_argument("--adopt", metavar="LAKE#BRANCH/MODEL@STEP", help="make this version the next one, and end")
    data = made.add_argument_group("one step on a data set, by TRL's trainer, instead of groups")
    data.add_argument("--on", type=Path, help="folder that `journeywork dataset` wrote")
    data.add_argument("--as", choices=("sft", "dpo", "kto"), dest="kind", help="its format; needed with --on")
    data.add_argument("--epochs", type=float, default=1.0)
    data.add_argument("--learning-rate", type=float, default=1e-5)
    data.add_argument("--batch-size", type=int, default=8, help="rows of an update")
    data.add_argument("--max-length", type=int, help="tokens of a row; default: vllm.max_model_len, else 4096")
    data.add_argument("--seed", type=int, default=0)
    return made


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    with options.running("train"):
        if (args.on is None) != (args.kind is None):
            raise ConfigError("--on and --as belong together: name a data set and its format")
        if args.on is not None and args.adopt:
            raise ConfigError("--on and --adopt are two steps: take one after the other")
        config = installation_settings(args.run_dir, args.config, args.overrides)
        log_of(config)
        state = read_state(Path(config.run_dir))
        if (
            state is not None
            and (pid := state.running_pid("trainer"))
            and installation_settings(config.run_dir).trainer.branch == config.trainer.branch
        ):
            raise ConfigError(
                f"{config.run_dir}: `journeywork up` trains there already, as process {pid}: stop it, or start it "
                "with --services and without the service trainer"
            )
        os.umask(0o077)  # the files of a run are readable by their owner only
        import_first(config)
        try:
            anyio.run(_train, config, args)
        except* (TrainerError, BrokerError) as group:
            raise TrainerError("; ".join(map(str, leaves(group)))) from group


async def _train(config: Config, args: argparse.Namespace) -> None:
    """Take the single step of `--on` or `--adopt` and print the new version, or run the trainer (`trainer.service`)."""
    if not args.adopt and args.on is None:
        from trainer.service import train

        await until_signalled(partial(train, until_empty=args.until_empty), config, lambda **_: None)
        return
    from trainer.datasets import DatasetStep, adopt, train_on  # with TRL, which takes a while to import

    if args.adopt:
        sys.stdout.write(visible(f"adopted as {await adopt(config, args.adopt)}\n"))
    else:
        length = args.max_length or config.vllm.max_model_len or 4096
        step = DatasetStep(args.on, args.kind, args.epochs, args.learning_rate, args.batch_size, length, args.seed)
        version, left_out = await train_on(config, step)
        reasons = "".join(f"  {count} × {why}\n" for why, count in left_out.items()) or "  nothing\n"
        sys.stdout.write(visible(f"trained {version}; conversations left out or cut:\n{reasons}"))


if __name__ == "__main__":
    logs.configure("train")
    main()
