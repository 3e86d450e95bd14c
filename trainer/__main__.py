"""`python -m trainer --config <toml>`: the trainer service, alone or as one of several processes (`trainer.parallel`)."""

import argparse
import os
import sys
from functools import partial

from pipeline.config import ConfigError, load
from pipeline.log import configure
from pipeline.service import main


def _run() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", default=None)
    given, _ = parser.parse_known_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _run_as_one_of_several(given.config)
        return
    try:
        processes = load(given.config).trainer.processes if given.config else 1
    except ConfigError:
        processes = 1  # `main` says what is wrong
    if processes > 1:
        from trainer.parallel import launch

        launch(processes, sys.argv[1:])
    from trainer.service import serve

    main("trainer", serve)


def _run_as_one_of_several(file: str) -> None:
    from trainer.parallel import Peers, adopt_ready_fd, follow

    peers = Peers.join()
    if peers.rank:
        config = load(file)
        configure("trainer", config.log_level)
        follow(config, peers)
        return
    from trainer.service import serve

    sys.argv[1:] = adopt_ready_fd(sys.argv[1:])
    main("trainer", partial(serve, peers=peers))
    peers.send(None)


if __name__ == "__main__":
    _run()
