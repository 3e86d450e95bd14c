"""Settings that running processes read again when their file changes: addresses of the log and of inference servers.

| process | file |
| --- | --- |
| a service | the one that it was started with. It reads it on SIGHUP too |
| `journeywork up` | the one given with `--config`. It writes new addresses to its services' `<run_dir>/config.toml` |

`up` does not take SIGHUP: a terminal sends it when it is closed, and `up` then ends. All other settings need a restart.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec

from pipeline.config import Config, ConfigError, load
from pipeline.log import connections
from pipeline.telemetry.logs import get_logger

log = get_logger("pipeline.running.reload")

RELOADED = frozenset({"nats.url", "vllm.urls", "sampler.advertise"})
"""Settings that take effect without a restart."""
CHECK_S = 2.0
"""Seconds between two looks at the file."""

Apply = Callable[[Config], Awaitable[None]]
"""Gets the settings in the changed file."""
_listeners: list[Apply] = []


@contextlib.contextmanager
def listening(listener: Apply) -> Iterator[None]:
    """Await `listener` with the new settings whenever those of this process's service change."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


async def watch_service(path: str, overrides: Sequence[str], config: Config) -> None:
    """Pass changes of the settings file on to every connection to the log and to the listeners. Never returns.

    `overrides`: the values given on the command line; `config`: the present settings."""
    servers = given = config.nats.servers

    async def apply(found: Config) -> None:
        nonlocal servers
        if found.nats.servers and found.nats.servers != servers:  # it may be empty while it is written
            servers = found.nats.servers
            log.info("nats.url has changed", servers=list(servers))
            await connections.use_servers(servers, given)
        for listener in _listeners:
            await listener(found)

    hangup = _Hangup()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hangup.receive)
            await watch(path, overrides, config, apply, hangup)
    finally:
        connections.forget(given)


class _Hangup:
    """SIGHUP."""

    def __init__(self) -> None:
        self._came = anyio.Event()

    async def receive(self) -> None:
        with anyio.open_signal_receiver(signal.SIGHUP) as signals:
            async for _ in signals:
                self._came.set()

    async def wait(self) -> None:
        """Return when the signal comes, or has come since the last call."""
        await self._came.wait()
        self._came = anyio.Event()


async def watch(
    path: str, overrides: Sequence[str], config: Config, apply: Apply, hangup: _Hangup | None = None
) -> None:
    """Await `apply` whenever the settings in `path` change. Never returns.

    `overrides`: the values given on the command line; `config`: the settings read before. `hangup`: has the file read
    at once."""
    present, stamp = config, (-1, -1)  # it may have changed since it was read
    while True:
        now = False
        with anyio.move_on_after(CHECK_S):
            await (hangup.wait() if hangup is not None else anyio.sleep_forever())
            now = True
        before, stamp = stamp, _stamp(path)
        found = _read(path, overrides) if now or before != stamp else None
        if found is None or found == present:
            continue
        if unused := sorted(_differences(present, found) - RELOADED):
            log.warning("these settings have changed and need a restart", settings=unused)
        present = found
        await apply(found)


def _differences(one: Config, other: Config) -> set[str]:
    """Return the dotted names of the settings that differ."""

    def flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from flat(inner, f"{name}.{key}" if name else key)
        else:
            yield name, value

    a, b = (dict(flat(msgspec.to_builtins(config), "")) for config in (one, other))
    return {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}


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
            "the changed settings can't be used; the process goes on with the former ones", error=str(error)
        )
        return None
