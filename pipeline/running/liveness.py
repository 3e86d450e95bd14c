"""Checks that a ready process still works. The supervisor runs them.

| process | check | if it fails for `supervisor.deadline_s` |
| --- | --- | --- |
| a service of Journeywork | its event loop writes a byte to `--ready-fd` every `BEAT_S` | it is killed and restarted |
| vLLM | its health page answers with HTTP status 200 | it is killed and restarted |
| the log (NATS) | every stream acknowledges a write | the server that `up` started is killed and started again |

`LogProbe.alarms` are messages to the operator that the log can't record: that it takes no writes, or that its disk is
nearly full. All other alarms are the store's (store/alarms).
"""

from __future__ import annotations

import os
import select
import shutil
from collections.abc import Awaitable, Callable

import anyio
import httpx

from pipeline import streams
from pipeline.config import Config, SupervisorConfig
from pipeline.errors import BrokerError
from pipeline.log import health
from pipeline.log.broker import Broker
from pipeline.running.service import BEAT_S
from pipeline.telemetry.logs import get_logger

logger = get_logger("pipeline.running.liveness")

MIN_FREE_BYTES = 4 * 1024 * 1024
"""Free bytes on the disk before a frozen log is restarted. With less, the next write would freeze it again."""


async def until_silent(fd: int, deadline_s: float) -> str:
    """Wait until no heartbeat has come through the pipe `fd` for `deadline_s` seconds, and return that as a sentence.
    Never returns once the pipe is closed: the process has ended, and the supervisor sees its exit."""
    while True:
        with anyio.move_on_after(deadline_s):
            await anyio.wait_readable(fd)
        # Read once more: if this process itself was suspended, the deadline passes while heartbeats wait in the pipe.
        if not select.select([fd], [], [], 0)[0]:
            return f"its event loop gave no sign of life for {deadline_s:g} s"
        if not os.read(fd, 65536):
            await anyio.sleep_forever()
        await anyio.sleep(min(BEAT_S, deadline_s))


async def until_unhealthy(url: str, settings: SupervisorConfig) -> str:
    """Wait until `url` has not answered with status 200 for `settings.deadline_s` seconds, and return why as a
    sentence."""
    failing_since = None
    async with httpx.AsyncClient(timeout=settings.deadline_s, trust_env=False) as client:
        while True:
            began = anyio.current_time()
            try:
                status = (await client.get(url)).status_code
                reason = "" if status == 200 else f"{url} answered {status}"
            except httpx.TransportError as error:
                reason = f"{url} did not answer: {str(error) or type(error).__name__}"
            if not reason:
                failing_since = None
            elif failing_since is None:
                failing_since = began
            elif anyio.current_time() - failing_since >= settings.deadline_s:
                return reason
            await anyio.sleep(settings.probe_every_s)


class LogProbe:
    """Checks the log by writes."""

    def __init__(self, config: Config) -> None:
        self._config, self._settings = config, config.supervisor
        self._folder = config.path("nats")
        self._probed: set[str] = set()
        """Streams that a probe did not find missing. One that has always been missing is no fault: the log is being
        provisioned."""
        self._alarms: dict[str, str] = {}
        """The present alarms, by what they are about."""
        self.checked = anyio.Event()
        """Set when the log was checked for the first time."""

    @property
    def alarms(self) -> tuple[str, ...]:
        """The present alarms for the operator."""
        return tuple(self._alarms.values())

    async def watch(self, on_failure: Callable[[str], Awaitable[None]]) -> None:
        """Check the log every `supervisor.probe_every_s` and keep `alarms` up to date. Call `on_failure` with the
        reason when a stream has accepted no write for `supervisor.deadline_s`, or the log can't be reached. Never
        returns."""
        while True:
            try:
                async with Broker.connect(self._config.nats, name="supervisor", provision=False) as broker:
                    await self._watch(broker, on_failure)
            except BrokerError as error:
                self.checked.set()
                await on_failure(str(error))
                await anyio.sleep(self._settings.probe_every_s)

    async def _watch(self, broker: Broker, on_failure: Callable[[str], Awaitable[None]]) -> None:
        """Check the log as `watch` does, over one connection, until that breaks. While the disk is full a restart would
        not help, so `on_failure` is called when there is room again."""
        failing_since: float | None = None
        was_full = False
        while True:
            began = anyio.current_time()
            reason, at_limit = await self._write_to_streams(broker)
            self._update_alarms(reason, at_limit)
            self.checked.set()
            if not reason:
                failing_since = None
            elif failing_since is None:
                failing_since = began
            if self._disk_is_full():
                if failing_since is not None and not was_full:
                    logger.error(
                        "the log accepts no writes and its disk is full: make room, then it is restarted",
                        folder=str(self._folder),
                    )
                was_full = True
            elif was_full or (
                failing_since is not None and anyio.current_time() - failing_since >= self._settings.deadline_s
            ):
                # After a full disk any stream or bucket may be frozen, also one that is not probed.
                await on_failure(reason or "its disk was full, and what met that takes no writes")
                failing_since, was_full = None, False
            await anyio.sleep(self._settings.probe_every_s)

    async def _write_to_streams(self, broker: Broker) -> tuple[str, dict[str, str]]:
        """Write a message to every stream. Return two things: why streams did not accept it (empty if all did, or a
        restart would not help), and the alarms about streams that are at a limit, by what they are about."""
        reasons: list[str] = []
        at_limit: dict[str, str] = {}

        async def write(name: str) -> None:
            """Write to one stream; add what is wrong with it to `reasons` or `at_limit`."""
            refusal = await health.probe(broker, name, self._settings.deadline_s)
            if refusal is not None and refusal.kind == "missing" and name not in self._probed:
                return
            self._probed.add(name)
            if refusal is None or refusal.kind == "refused":  # a restart does not change what the server answers
                return
            if refusal.kind == "at_limit":
                at_limit[f"{name} at its limit"] = refusal.reason
            else:
                reasons.append(refusal.reason)

        async with anyio.create_task_group() as tg:
            for spec in streams.STREAMS:
                tg.start_soon(write, spec.name)
        return "; ".join(sorted(reasons)), at_limit

    def _update_alarms(self, reason: str, at_limit: dict[str, str]) -> None:
        """Replace the present alarms, and log those that begin or end. `reason` and `at_limit`: as `_write_to_streams`
        returns them."""
        present = {"the log": f"the log takes no writes: {reason}"} if reason else {}
        if self._folder.exists():
            disk = health.disk_fill(self._folder)
            if disk.share >= (1 + self._config.alarms.full_share) / 2:  # as `log_full` of the store
                present["the disk"] = (
                    f"{disk.name} holds {disk.bytes:,} of at most {disk.limit:,} bytes ({disk.share:.0%}): make room, "
                    "or the log stops"
                )
        present |= at_limit
        for about in present.keys() - self._alarms.keys():
            logger.error("alarm", detail=present[about])
        for about in self._alarms.keys() - present.keys():
            logger.info("alarm over", detail=self._alarms[about])
        self._alarms = present

    def _disk_is_full(self) -> bool:
        """Return whether the disk of the log is full. False if it is on another machine and not known."""
        return self._folder.exists() and shutil.disk_usage(self._folder).free < MIN_FREE_BYTES
