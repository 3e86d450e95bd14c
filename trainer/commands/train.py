"""`journeywork train`: the trainer alone, on a log that runs elsewhere.

    journeywork train --config settings.toml --set nats.url=nats://host:4222

Every start resumes from the newest committed step. Several GPUs: the same under
`accelerate launch -m trainer.commands.train`. Ctrl-C stops it between steps.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import anyio
import msgspec

from pipeline.config import ConfigError
from pipeline.log.broker import BrokerError
from pipeline.running.service import until_signalled
from pipeline.running.state import read_state
from pipeline.telemetry import logs as log
from trainer.commands import cli
from trainer.first import import_first


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="journeywork train", description="Run the trainer alone.")
    cli.add_run_arguments(made)
    made.add_argument("--dry-run", action="store_true", help="print the resolved settings and stop")
    return made


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)

    def command() -> None:
        config = cli.run_config(args)
        if args.dry_run:
            print(msgspec.json.format(msgspec.json.encode(config), indent=2).decode())  # noqa: T201 - the output
            return
        if not config.nats.url:
            raise ConfigError("nats.url: name the log with --nats-url")
        state = read_state(Path(config.run_dir))
        if state is not None and (pid := state.running_pid("trainer")):
            raise ConfigError(
                f"{config.run_dir}: `journeywork up` trains there already, as process {pid}: stop it, or start it "
                "with --services and without the service trainer"
            )
        os.umask(0o077)  # the files of a run are readable by their owner only
        import_first(config)
        from trainer.checkpoints.commits import TrainerError
        from trainer.service import train

        try:
            anyio.run(until_signalled, train, config, lambda **_: None)
        except* (TrainerError, BrokerError) as group:
            raise cli.FailedError("; ".join(str(e) for e in _leaves(group))) from group

    cli.run("train", command)


def _leaves(group: BaseExceptionGroup[Exception]) -> list[Exception]:
    out: list[Exception] = []
    for error in group.exceptions:
        out += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return out


if __name__ == "__main__":
    log.configure("train")
    main()
