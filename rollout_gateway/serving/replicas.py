"""The inference servers: which are up, what they have loaded, which one takes a call.

A request holds a `Lease` on one replica and one exact version while it runs, so a version is unloaded only after the
last request that names it. `Fleet.acquire` waits where no replica can serve yet: an agent sees a delay while a server
restarts, not a failure.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from rollout_gateway.http.errors import stopping, unavailable
from rollout_gateway.http.upstream import Upstream


@dataclass(eq=False)
class Loaded:
    """An adapter that a replica holds."""

    path: str
    delta: float = 0.0
    last_used: float = 0.0


class Replica:
    """One inference server."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.upstream = Upstream(url, api_key=api_key)
        self.name = url.partition("://")[2].rstrip("/")
        self.up = False
        self.ready = False
        """Up, and holds what it has to hold: may be routed to."""
        self.doubted = False
        """A call failed here, and its keeper has not looked since."""
        self.incarnation = ""
        """Changes when the server restarts."""
        self.loaded: dict[str, Loaded] = {}
        """Adapters by version; base versions need no entry."""
        self.draining: set[str] = set()
        self.in_flight: Counter[str] = Counter()
        self.work = asyncio.Event()
        """Set when its keeper should look again."""

    @property
    def load(self) -> int:
        return self.in_flight.total()

    def serves(self, version: str) -> bool:
        return self.ready and self.holds(version)

    def holds(self, version: str) -> bool:
        return version.endswith("@0") or (version in self.loaded and version not in self.draining)

    def suspect(self) -> None:
        """Something says that it died or lost its adapters: nothing new goes there until its keeper has looked."""
        self.ready = False
        self.up = False
        self.doubted = True
        self.work.set()


@dataclass(eq=False, slots=True)
class Lease:
    """A running request's hold on a version at a replica."""

    fleet: Fleet
    replica: Replica
    version: str

    def release(self) -> None:
        self.replica.in_flight[self.version] -= 1
        if self.replica.in_flight[self.version] <= 0:
            del self.replica.in_flight[self.version]
            if self.fleet.waiting_for_room:
                self.replica.work.set()


class Fleet:
    """All replicas."""

    def __init__(self, urls: tuple[str, ...], api_key: str = "") -> None:
        """`api_key` is what every server asks for; empty if they ask for none."""
        self.replicas = [Replica(url, api_key) for url in urls]
        self.demanded: dict[str, float] = {}
        """Exact versions that a request waits or waited for, with the time of the last such request."""
        self.waiting_for_room = False
        self.closing = False
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Nothing waits from now on: what can't be answered at once is told to come back."""
        self.closing = True
        self.changed()

    def ready(self) -> list[Replica]:
        return [r for r in self.replicas if r.ready]

    def change(self) -> asyncio.Event:
        """Set when something about a replica changes next."""
        return self._changed

    def changed(self) -> None:
        """Wake whoever waits for a replica or a version."""
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def wake_keepers(self) -> None:
        for replica in self.replicas:
            replica.work.set()

    def available(self, version: str) -> bool:
        """Every replica that takes calls serves `version`, and there is one."""
        ready = self.ready()
        return bool(ready) and all(r.holds(version) for r in ready)

    def demand(self, version: str) -> None:
        self.demanded[version] = time.monotonic()
        self.wake_keepers()

    async def acquire(
        self, resolve: Callable[[], str], prefer: Callable[[list[Replica]], Replica], deadline: float
    ) -> Lease:
        """A lease on a replica that serves what `resolve` says at that moment.

        Waits until `deadline` (`time.monotonic`); raises a 503 `ApiError` then. What `resolve` raises goes through."""
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
            if self.ready():
                self.demand(version)
            changed = self._changed
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await changed.wait()
            except TimeoutError:
                raise unavailable(
                    f"No inference server is ready to serve {version}: "
                    + (
                        "it could not be loaded in time."
                        if self.ready()
                        else "none is up. They are retried all the time."
                    ),
                    "no_replica",
                ) from None


def least_loaded(replicas: list[Replica]) -> Replica:
    return min(replicas, key=lambda r: r.load)
