"""`python -m rollout_gateway --config <toml>`. `--worker` starts a worker (`rollout_gateway.workers.owner`)."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from pipeline.running.service import main
from rollout_gateway.service import check, serve
from rollout_gateway.workers.group import WorkerGroup

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--worker", nargs=3, type=int, default=None)
    parser.add_argument("--ready-fd", default=None)
    mine, settings = (
        parser.parse_known_args()
    )  # workers get the same settings, and a pipe of their own to report to
    workers = WorkerGroup.join(*mine.worker) if mine.worker else WorkerGroup()
    main(
        "rollout_gateway",
        partial(serve, workers=workers, command=(sys.executable, "-m", "rollout_gateway", *settings)),
        check,
        argv=[*settings, *(["--ready-fd", mine.ready_fd] if mine.ready_fd else [])],
        **({"worker": workers.number} if workers.number else {}),
    )
