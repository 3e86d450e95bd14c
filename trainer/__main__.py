"""`python -m trainer --config <toml>`: the trainer service, alone or as one of several processes
(`trainer.engine.parallel`)."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from pipeline.config import Config, ConfigError, load
from pipeline.running.service import main
from pipeline.telemetry.logs import configure
from trainer.first import import_first

if TYPE_CHECKING:
    from trainer.engine.parallel import ProcessGroup


def _run() -> None:
    """Run the trainer service. With `trainer.processes` above 1, this process becomes torchrun, which starts the
    trainer's processes; they find WORLD_SIZE in their environment.

    The settings are read here, because torchrun and `import_first` come before the service's modules are imported.
    `main` reads all arguments."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", default=None)
    args, _ = parser.parse_known_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _run_as_one_of_several(args.config)
        return
    try:
        config = load(args.config) if args.config else None
    except ConfigError:
        config = None  # `main` reads them again and prints the error
    if config is not None and config.trainer.processes > 1:
        from trainer.engine.parallel import launch

        launch(config.trainer.processes, sys.argv[1:])
    _import_first(config)
    from trainer.service import serve

    main("trainer", serve)


def _import_first(config: Config | None) -> None:
    """Import what has to be imported before other modules (`trainer.first`). Exits with 2 if it is not installed."""
    if config is None:
        return
    try:
        import_first(config)
    except ConfigError as error:
        sys.stderr.write(f"trainer: {error}\n")
        raise SystemExit(2) from error


def _run_as_one_of_several(file: str) -> None:
    """Run this process as one of those that torchrun started: rank 0 is the service, the others do its jobs until it
    ends."""
    from trainer.engine.parallel import ProcessGroup

    process_group = ProcessGroup.join()  # first: it selects this process's GPU
    _import_first(load(file) if file else None)
    if process_group.rank:
        _work(load(file), process_group)
        process_group.close(0)
    from trainer.service import serve

    try:
        main("trainer", partial(serve, process_group=process_group))
    except SystemExit as end:
        process_group.close(int(end.code or 0))
    process_group.send(None)
    process_group.close(0)


def _work(config: Config, process_group: ProcessGroup) -> None:
    """Do a worker process's part of every step, until rank 0 ends."""
    from trainer.learner import make_engines

    configure("trainer", config.log_level)
    engines = list(dict.fromkeys(make_engines(config, process_group).values()))  # by number, as `Job.engine` names them
    process_group.worker_loop(lambda job: engines[job.engine].passes.take_part(job))


if __name__ == "__main__":
    _run()
