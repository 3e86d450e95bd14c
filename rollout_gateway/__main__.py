"""`python -m rollout_gateway --config <toml>`. `--worker` starts a worker (`rollout_gateway.workers.owner`)."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from pipeline.running.service import main
from rollout_gateway.service import check, serve
from rollout_gateway.workers.siblings import Siblings

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default="")
    parser.add_argument("--worker", nargs=3, type=int, default=None)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    mine = parser.parse_known_args()[0]
    siblings = Siblings.of_worker(*mine.worker) if mine.worker else Siblings()
    arguments = [*sys.argv[1:]]
    if mine.worker:
        at = arguments.index("--worker")
        del arguments[at : at + 4]
    overrides = [argument for setting in mine.overrides for argument in ("--set", setting)]
    command = (sys.executable, "-m", "rollout_gateway", "--config", mine.config, *overrides)
    main(
        "rollout_gateway",
        partial(serve, siblings=siblings, command=command),
        check,
        argv=arguments,
        has_page=lambda config: config.gateway.workers == 1,
        **({"worker": siblings.number} if siblings.number else {}),
    )
