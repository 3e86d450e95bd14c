"""Checks that a ready process still works. The supervisor runs them.

| process | check | if it fails for `supervisor.deadline_s` |
| --- | --- | --- |
| a service of Journeywork | its event loop writes a byte to `--ready-fd` every `BEAT_S` | it is killed and restarted |
| vLLM | its health page answers with HTTP status 200 | it is killed and restarted |
| the log (NATS) | every stream acknowledges a write | the server that `up` started is killed and started again |

The log is checked by a write, because after a full disk a stream answers every request and accepts no message until
its server restarts. The message of a check lives for `ALIVE_TTL_S` on `alive.<stream>`, which no consumer reads.

`Fill` is the size of a stream and its limit. `alarms` are messages to the operator.
"""

from __future__ import annotations

import os
import select
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import nats.errors
import nats.js.errors

from pipeline import streams
from pipeline.config import Config, SupervisorConfig
from pipeline.errors import BrokerError
from pipeline.log.broker import Broker
from pipeline.log.unwritten import UnwrittenEvents
from pipeline.running.service import BEAT_S
from pipeline.telemetry.logs import get_logger

log = get_logger("pipeline.running.liveness")

ALIVE_TTL_S = 60
MIN_FREE_BYTES = 4 * 1024 * 1024
"""Free bytes on the disk before a frozen log is restarted. With less, the next write would freeze it again."""
ALARM_SHARE = 0.8
"""Share of a limit (a stream's bytes, the disk) at which an alarm is raised."""
_BYTES_EXCEEDED = frozenset({10047, 10054, 10077, 10120})
"""JetStream's error codes for a limit that is reached. The server works, and a restart does not help."""


async def silent(fd: int, deadline_s: float) -> str:
    """Return the reason when no heartbeat has come through `fd` for `deadline_s` seconds. Never returns after the
    pipe is closed: the process ended, which the supervisor sees by its exit."""
    while True:
        with anyio.move_on_after(deadline_s):
            await anyio.wait_readable(fd)
        # Read once more: if this process itself was suspended, the deadline passes while heartbeats wait in the pipe.
        if not select.select([fd], [], [], 0)[0]:
            return f"its event loop gave no sign of life for {deadline_s:g} s"
        if not os.read(fd, 65536):
            await anyio.sleep_forever()
        await anyio.sleep(min(BEAT_S, deadline_s))


async def unhealthy(url: str, settings: SupervisorConfig) -> str:
    """Return the reason when `url` has failed for `settings.deadline_s` seconds."""
    since = None
    async with httpx.AsyncClient(timeout=settings.deadline_s, trust_env=False) as client:
        while True:
            began = anyio.current_time()
            try:
                status = (await client.get(url)).status_code
                reason = "" if status == 200 else f"{url} answered {status}"
            except httpx.TransportError as error:
                reason = f"{url} did not answer: {str(error) or type(error).__name__}"
            if not reason:
                since = None
            elif since is None:
                since = began
            elif anyio.current_time() - since >= settings.deadline_s:
                return reason
            await anyio.sleep(settings.probe_every_s)


@dataclass(frozen=True)
class Fill:
    """How full a stream or a bucket is."""

    name: str
    bytes: int
    limit: int
    """0: no limit."""
    full: str
    """What happens at the limit."""

    @property
    def share(self) -> float:
        return self.bytes / self.limit if self.limit else 0.0

    def alarm(self) -> str:
        """Return the alarm for the operator; empty if nothing is wrong."""
        if self.share < ALARM_SHARE:
            return ""
        return (
            f"{self.name} holds {self.bytes:,} of at most {self.limit:,} bytes ({self.share:.0%}); at the limit "
            f"{self.full}. Raise nats.max_bytes, or wait for the store to catch up and shorten the retention"
        )


async def fills(broker: Broker) -> list[Fill]:
    """Return the size of every stream and bucket that exists. Raises `BrokerError` if the server does not answer."""
    out = []
    at_limit = {s.name: s.at_limit for s in streams.STREAMS}
    at_limit |= {streams.bucket_stream(b.name): "the server refuses new objects" for b in streams.buckets()}
    for name, full in at_limit.items():
        try:
            info = await broker.js.stream_info(name)
        except nats.js.errors.NotFoundError:
            continue
        except (nats.errors.Error, nats.js.errors.Error) as error:
            raise BrokerError(f"{name} was not described: {error}") from error
        out.append(Fill(name, info.state.bytes, max(0, info.config.max_bytes or 0), full))
    return out


def disk_alarm(folder: Path) -> str:
    """Return the alarm about the disk that holds `folder`; empty if nothing is wrong."""
    disk = shutil.disk_usage(folder)
    if disk.free > (1 - ALARM_SHARE) / 2 * disk.total:
        return ""
    return (
        f"the disk under {folder} has {disk.free:,} of {disk.total:,} bytes left: make room, or the log stops"
    )


class LogProbe:
    """Checks the log by writes.

    `alarms` holds the present alarms for the operator. `on_alarms` is called when they change."""

    def __init__(self, config: Config, on_alarms: Callable[[], None] = lambda: None) -> None:
        self._config, self._settings = config, config.supervisor
        self._folder = config.path("nats")
        self._on_alarms = on_alarms
        self._seen: set[str] = set()
        """Streams that existed once. Only they can be missing."""
        self._unwritten = UnwrittenEvents(config.alarms.unwritten_share)
        self._refused: list[str] = []
        """Alarms about streams that are at a limit, by the last write to each."""
        self.alarms: tuple[str, ...] = ()
        self.checked = anyio.Event()
        """Set when the log was checked for the first time."""

    async def watch(self, lost: Callable[[str], Awaitable[None]]) -> None:
        """Check the log every `supervisor.probe_every_s` and keep `alarms` up to date. When a stream has accepted no
        write for `supervisor.deadline_s`, or the log can't be reached, call `lost` with the reason. Never returns."""
        while True:
            try:
                async with Broker.connect(self._config.nats, name="supervisor", provision=False) as broker:
                    await self._watch(broker, lost)
            except BrokerError as error:
                self.checked.set()
                await lost(str(error))
                await anyio.sleep(self._settings.probe_every_s)

    async def _watch(self, broker: Broker, lost: Callable[[str], Awaitable[None]]) -> None:
        since: float | None = None
        while True:
            began = anyio.current_time()
            reason = await self._write(broker)
            await self._update_alarms(broker, reason)
            self.checked.set()
            if not reason:
                since = None
            elif since is None:
                since = began
            if (
                since is not None
                and anyio.current_time() - since >= self._settings.deadline_s
                and self._restart_can_help()
            ):
                await lost(reason)
                since = None
            await anyio.sleep(self._settings.probe_every_s)

    async def _write(self, broker: Broker) -> str:
        """Write a message to every stream. Return why one did not accept it, or an empty string."""
        reasons: list[str] = []
        self._refused = []

        async def write(name: str) -> None:
            try:
                await broker.js.publish(
                    streams.alive_subject(name), b"", timeout=self._settings.deadline_s,
                    headers={"Nats-TTL": f"{ALIVE_TTL_S}s"},
                )  # fmt: skip
            except nats.js.errors.NoStreamResponseError:
                if name in self._seen:
                    reasons.append(await broker.why_no_answer(name))
                return
            except nats.js.errors.APIError as error:
                if error.err_code in _BYTES_EXCEEDED:
                    self._refused.append(
                        f"{name} takes no events ({error.description}): raise nats.max_bytes"
                    )
                elif error.code == 503:
                    reasons.append(f"{name}: {error.description}")
            except (nats.errors.Error, TimeoutError) as error:
                reasons.append(f"{name} did not take a write: {str(error) or type(error).__name__}")
            self._seen.add(name)

        async with anyio.create_task_group() as tg:
            for spec in streams.STREAMS:
                tg.start_soon(write, spec.name)
        return "; ".join(sorted(reasons))

    async def _update_alarms(self, broker: Broker, reason: str) -> None:
        """Find the present alarms, log those that begin or end, and report a change. `reason`: why writes fail."""
        found = [f"the log takes no writes: {reason}"] if reason else []
        found += self._refused
        if self._folder.exists() and (full := disk_alarm(self._folder)):
            found.append(full)
        try:
            found += filter(None, (f.alarm() for f in await fills(broker)))
            with anyio.move_on_after(self._settings.deadline_s):
                found += [one.detail for one in await self._unwritten.found(broker)]
        except (BrokerError, nats.errors.Error, nats.js.errors.Error) as error:
            log.warning("the log's size and the store's lag could not be read", error=str(error))
        for alarm in found:
            if not any(_same(alarm, a) for a in self.alarms):
                log.error("alarm", detail=alarm)
        for alarm in self.alarms:
            if not any(_same(alarm, a) for a in found):
                log.info("alarm over", detail=alarm)
        if self.alarms != tuple(found):
            self.alarms = tuple(found)
            self._on_alarms()

    def _restart_can_help(self) -> bool:
        """Return false if the disk of the log is full. Returns true if the disk is on another machine and not known."""
        if not self._folder.exists() or shutil.disk_usage(self._folder).free >= MIN_FREE_BYTES:
            return True
        log.error(
            "the log accepts no writes and its disk is full: make room, then it is restarted",
            folder=str(self._folder),
        )
        return False


def _same(a: str, b: str) -> bool:
    """Return whether two alarms are about the same thing and differ only in figures."""
    return a.split()[:4] == b.split()[:4] if a[:4] == "the " else a.split()[0] == b.split()[0]
