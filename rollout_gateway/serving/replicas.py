"""The inference servers: which are up, which adapters they hold, and which one takes a call.

A request holds a `Lease` on one replica and one exact version while it runs, so a version is unloaded only after the
last request that uses it. `Fleet.acquire` waits while no replica can serve: an agent sees a delay when a server
restarts, not a failure.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.names import is_base_version
from rollout_gateway.http.errors import ApiError, stopping
from rollout_gateway.http.upstream import Upstream


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter that a replica holds."""

    path: str
    last_used: float
    """Time of the last use, by `time.monotonic`."""


class Replica:
    """One inference server."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.upstream = Upstream(url, api_key=api_key)
        self.name = url.partition("://")[2].rstrip("/")
        self.up = False
        self.ready = False
        """Whether it is up and holds the adapters that it has to hold. Only then it takes calls."""
        self.suspected = False
        """A call failed here, and the server has not been checked since."""
        self.incarnation = ""
        """Identifies the server process: changes when the server restarts."""
        self.loaded: dict[str, LoadedAdapter] = {}
        """Loaded adapters by version. Base versions have no adapter."""
        self.draining: set[str] = set()
        """Versions that are about to be unloaded and take no new call."""
        self.in_flight: Counter[str] = Counter()
        """Calls by version."""
        self.work = asyncio.Event()
        """Set to have the server checked and its adapters loaded."""

    @property
    def load(self) -> int:
        return self.in_flight.total()

    def serves(self, version: str) -> bool:
        return self.ready and self.holds(version)

    def holds(self, version: str) -> bool:
        return is_base_version(version) or (version in self.loaded and version not in self.draining)

    def suspect(self) -> None:
        """Send nothing to the server until it has been checked: it may have died or lost its adapters."""
        self.ready = False
        self.up = False
        self.suspected = True
        self.work.set()


@dataclass(eq=False, slots=True)
class Lease:
    """The hold of a running request on a version at a replica."""

    fleet: Fleet
    replica: Replica
    version: str

    def release(self) -> None:
        in_flight = self.replica.in_flight
        in_flight[self.version] -= 1
        if in_flight[self.version] <= 0:
            del in_flight[self.version]
            if self.fleet.waiting_for_room:
                self.replica.work.set()


class Fleet:
    """All replicas."""

    def __init__(self, urls: tuple[str, ...], api_key: str = "") -> None:
        """`api_key` is sent to every server; empty sends none."""
        self.replicas = [Replica(url, api_key) for url in urls]
        self.demanded: dict[str, float] = {}
        """Exact versions that a request waits or waited for, with the `time.monotonic` of the last such request."""
        self.waiting_for_room = False
        """A version can't be loaded until another one is no longer in use."""
        self.closing = False
        self._changed = asyncio.Event()

    def close(self) -> None:
        """From now on, a call that no replica can take at once gets a 503."""
        self.closing = True
        self.changed()

    def ready(self) -> list[Replica]:
        return [r for r in self.replicas if r.ready]

    def change(self) -> asyncio.Event:
        """The event that is set at the next change of a replica."""
        return self._changed

    def changed(self) -> None:
        """Wake the tasks that wait for a replica or a version."""
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def check_all(self) -> None:
        """Have every server checked and its adapters loaded."""
        for replica in self.replicas:
            replica.work.set()

    def available(self, version: str) -> bool:
        """Whether every replica that takes calls holds `version`, and there is one."""
        ready = self.ready()
        return bool(ready) and all(r.holds(version) for r in ready)

    async def acquire(
        self, resolve: Callable[[], str], prefer: Callable[[list[Replica]], Replica], deadline: float
    ) -> Lease:
        """Wait for a replica that serves the version which `resolve` returns at that moment, and lease it.

        `prefer` chooses among several; `deadline` is by `time.monotonic`. Raises a 503 `ApiError` at the deadline or if
        the gateway stops, and whatever `resolve` raises."""
        while True:
            version = resolve()
            able = [r for r in self.replicas if r.serves(version)]
            if able:
                replica = able[0] if len(able) == 1 else prefer(able)
                replica.in_flight[version] += 1
                if version in replica.loaded:
                    replica.loaded[version].last_used = time.monotonic()
                return Lease(self, replica, version)
            if self.closing:
                raise stopping()
            any_ready = bool(self.ready())
            if any_ready:
                self.demanded[version] = time.monotonic()
                self.check_all()
            changed = self._changed
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await changed.wait()
            except TimeoutError:
                why = (
                    "it was not loaded in time"
                    if any_ready
                    else "none is up; the gateway keeps checking them"
                )
                raise ApiError(
                    503, "no_replica", f"No inference server is ready to serve {version}: {why}."
                ) from None


def least_loaded(replicas: list[Replica]) -> Replica:
    return min(replicas, key=lambda r: r.load)
