"""The life of a service process: it reads settings, reports readiness, and stops cleanly on SIGTERM.

    python -m judge --config runs/x/config.toml --ready-fd 5

`serve(config, ready)` is the service; it calls `ready(url=…)` when it works. The supervisor passes a pipe whose write
end is `--ready-fd`; readiness is one JSON line, followed by one byte every `BEAT_S` as the event loop's heartbeat.
SIGTERM and SIGINT cancel `serve`; the exit code is then 0.
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

from pipeline.config import Config, ConfigError, load
from pipeline.errors import leaves
from pipeline.telemetry import logs
from pipeline.terminal.parsers import add_overrides

BEAT_S = 1.0
"""Seconds between two heartbeats."""


class Ready(Protocol):
    """Reports that the service is ready, with facts such as its URL. Further reports are only logged."""

    def __call__(self, **facts: str | int | float) -> None: ...


Serve = Callable[[Config, Ready], Awaitable[None]]


class _Report:
    """Reports readiness, and then heartbeats, through the supervisor's pipe."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._ready = anyio.Event()

    def __call__(self, **facts: str | int | float) -> None:
        """Report readiness with `facts`, once, and log each call."""
        if self._fd is not None and not self._ready.is_set():
            os.write(self._fd, msgspec.json.encode({"ready": True, **facts}) + b"\n")
        self._ready.set()
        logs.get_logger("pipeline.running.service").info("ready", **facts)

    async def beat(self) -> None:
        """Write a byte to the pipe every `BEAT_S` after readiness, as long as the event loop runs. Returns if there is
        no pipe, or nobody reads it any more."""
        await self._ready.wait()
        if self._fd is None:
            return
        os.set_blocking(self._fd, False)
        while True:
            try:
                os.write(self._fd, b".")
            except BlockingIOError:
                pass  # the pipe is full: the supervisor will find enough heartbeats in it
            except BrokenPipeError:
                return
            await anyio.sleep(BEAT_S)


async def until_signalled(serve: Serve, config: Config, ready: Ready) -> None:
    """Run `serve` until it ends, or is cancelled by SIGTERM or SIGINT."""
    async with anyio.create_task_group() as tg:

        async def stop_on_signal() -> None:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    tg.cancel_scope.cancel()
                    return

        tg.start_soon(stop_on_signal)
        await serve(config, ready)
        tg.cancel_scope.cancel()


async def _run(serve: Serve, config: Config, args: argparse.Namespace) -> None:
    """Run `serve` with the heartbeats beside it, in one task group: the end of `serve` ends both."""
    report = _Report(args.ready_fd)
    async with anyio.create_task_group() as tg:
        tg.start_soon(report.beat)
        await until_signalled(serve, config, report)
        tg.cancel_scope.cancel()


def main(name: str, serve: Serve, check: Callable[[Config], None] = lambda config: None) -> None:
    """Run the service module `name` by the arguments of this process: read the settings, run `check`, then `serve`, or
    with `--check` nothing more. `check` raises `ConfigError` for settings with which the service can't work. Exits 0
    when stopped, 2 if settings can't be used, 1 on a crash."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}")
    parser.add_argument("--config", required=True, help="TOML settings")
    add_overrides(parser)
    parser.add_argument("--ready-fd", type=int, default=None)
    parser.add_argument("--check", action="store_true", help="check the settings only")
    args = parser.parse_args()
    try:
        config = load(args.config, args.overrides)
        check(config)
        if args.check:
            return
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from error
    logs.configure(name, config.log_level)
    os.umask(0o077)  # files of a run hold prompts, replies and keys: only the owner may read them
    try:
        anyio.run(_run, serve, config, args, backend_options={"use_uvloop": True})
    except Exception as error:
        errors = leaves(error)
        if all(isinstance(e, ConfigError) for e in errors):
            sys.stderr.write("\n".join(map(str, errors)) + "\n")
            raise SystemExit(2) from error
        logs.get_logger(name).error("crashed", exc=error)
        raise SystemExit(1) from error
