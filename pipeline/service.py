"""How a service process lives: settings in, readiness out, a clean stop on SIGTERM.

    python -m judge --config runs/x/config.toml --ready-fd 5

`serve(config, ready)` is the service; it calls `ready(url=…)` once it works. The supervisor passes a pipe whose write
end is `--ready-fd`; readiness is one JSON line on it. SIGTERM and SIGINT cancel `serve`, which cleans up as cancellation
unwinds; the exit code is 0 then.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio
import msgspec

from pipeline import log
from pipeline.config import Config, ConfigError, load


class Ready(Protocol):
    """Tells the supervisor that the service works, with what others must know of it."""

    def __call__(self, **facts: str | int | float) -> None: ...


Serve = Callable[[Config, Ready], Awaitable[None]]


def _ready_on(fd: int | None) -> Ready:
    def ready(**facts: str | int | float) -> None:
        line = msgspec.json.encode({"ready": True, **facts}) + b"\n"
        if fd is not None:
            os.write(fd, line)
            os.close(fd)
        log.get_logger("pipeline.service").info("ready", **facts)

    return ready


async def _until_signalled(serve: Serve, config: Config, ready: Ready) -> None:
    async with anyio.create_task_group() as tg:

        async def stop_on_signal() -> None:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    tg.cancel_scope.cancel()
                    return

        tg.start_soon(stop_on_signal)
        await serve(config, ready)
        tg.cancel_scope.cancel()


def main(name: str, serve: Serve) -> None:
    """Run `serve` as this process; exits 0 when stopped, 2 on unusable settings, 1 on a crash."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}")
    parser.add_argument("--config", required=True, help="TOML settings")
    parser.add_argument("--ready-fd", type=int, default=None)
    args = parser.parse_args()
    try:
        config = load(args.config)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from error
    log.configure(name, config.log_level)
    os.umask(0o077)  # a run's files are its owner's: they hold prompts, replies and keys
    try:
        anyio.run(
            _until_signalled, serve, config, _ready_on(args.ready_fd), backend_options={"use_uvloop": True}
        )
    except Exception as error:
        log.get_logger(name).error("crashed", exc=error)
        raise SystemExit(1) from error
