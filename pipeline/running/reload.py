"""Settings that a running service reads again when its file changes or it gets SIGHUP: the addresses in `nats.url`.

Inference servers need no setting: sampler agents register them on the log. Every other setting needs a restart.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import anyio

from pipeline.config import Config, ConfigError, load
from pipeline.log import connections
from pipeline.telemetry.logs import get_logger

log = get_logger("pipeline.running.reload")

CHECK_S = 2.0
"""Seconds between two looks at the file."""


async def watch(path: str, overrides: Sequence[str], config: Config) -> None:
    """Have every connection to the log use the addresses in the settings file `path` when they change. Never returns.

    `overrides`: the values given on the command line; `config`: the present settings."""
    hangup = anyio.Event()

    async def receive() -> None:
        nonlocal hangup
        with anyio.open_signal_receiver(signal.SIGHUP) as signals:
            async for _ in signals:
                hangup.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive)
        servers, stamp = config.nats.servers, _stamp(path)
        while True:
            with anyio.move_on_after(CHECK_S):
                await hangup.wait()
            before, stamp = stamp, _stamp(path)
            if before == stamp and not hangup.is_set():
                continue
            hangup = anyio.Event()
            found = _read(path, overrides)
            if found is not None and found.nats.servers != servers:
                servers = found.nats.servers
                log.info("nats.url has changed", servers=list(servers))
                await connections.use_servers(servers)


def _stamp(path: str) -> tuple[int, int]:
    """Return what changes when the file is written; zeros while there is none."""
    try:
        found = Path(path).stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino


def _read(path: str, overrides: Sequence[str]) -> Config | None:
    """Return the settings in the file; `None` if they can't be used, with an error in the log."""
    try:
        return load(path, list(overrides))
    except ConfigError as error:
        log.error(
            "the changed settings can't be used; the service goes on with the former ones", error=str(error)
        )
        return None
