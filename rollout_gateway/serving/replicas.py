"""The inference servers that take calls: which are up, which adapters they hold, and which one takes a call.

A call holds a `Lease` on one replica and one exact version while it runs. The gateway reports the leased versions to
the sampler agents (`rollout_gateway.serving.members`), so a version is unloaded only after the last call that uses it.
`Fleet.acquire` waits while no replica can serve: an agent program sees a delay when a server restarts, not a failure.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.names import is_base_version
from rollout_gateway.http.errors import ApiError, stopping
from rollout_gateway.http.upstream import Upstream
from rollout_gateway.serving.fleet_records import replica_name


class Replica:
    """One inference server."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.upstream = Upstream(url, api_key=api_key)
        self.name = replica_name(url)
        self.up = False
        self.ready = False
        """Whether it is registered, up, and the process that was registered. Only then it takes calls."""
        self.suspected = False
        """A call failed here, and the server has not been checked since."""
        self.incarnation = ""
        """Identifies the server process that its sampler agent registered: changes when the server restarts."""
        self.models: tuple[str, ...] = ()
        """Names of the models that it serves. Empty: any."""
        self.capacity = 1.0
        """Share of the conversations that it gets, relative to other replicas."""
        self.refused: dict[str, str] = {}
        """Versions that failed a check here, with the reason."""
        self.loaded: dict[str, str] = {}
        """SHA-256 of the adapter of each loaded version, by the log. Base versions have no adapter."""
        self.in_flight: Counter[str] = Counter()
        """Calls by version."""
        self.work = asyncio.Event()
        """Set to have the server checked now."""
        self._hash_key = hashlib.blake2b(self.name.encode(), digest_size=16).digest()

    @property
    def load(self) -> int:
        return self.in_flight.total()

    def serves(self, version: str) -> bool:
        return self.ready and self.holds(version)

    def holds(self, version: str) -> bool:
        if is_base_version(version):
            return self.serves_model(version[:-2])
        return version in self.loaded

    def serves_model(self, model: str) -> bool:
        return not self.models or model in self.models

    def suspect(self) -> None:
        """Send nothing to the server until it has been checked: it may have died or lost its adapters."""
        self.ready = False
        self.up = False
        self.suspected = True
        self.work.set()

    def leave(self) -> None:
        """Send nothing to the server any more: its sampler agent has gone."""
        self.up = self.ready = self.suspected = False

    def score(self, conversation: bytes) -> float:
        """Return the score of this replica for a conversation, by weighted rendezvous hashing: the same at every
        gateway, and independent of the other replicas."""
        digest = hashlib.blake2b(conversation, digest_size=8, key=self._hash_key).digest()
        return -self.capacity / math.log((int.from_bytes(digest, "big") + 1) / (2**64 + 1))


@dataclass(eq=False, slots=True)
class Lease:
    """The hold of a running call on a version at a replica."""

    fleet: Fleet
    replica: Replica
    version: str

    def release(self) -> None:
        in_flight = self.replica.in_flight
        in_flight[self.version] -= 1
        if in_flight[self.version] <= 0:
            del in_flight[self.version]
            if not self.replica.holds(self.version):
                self.fleet.use_changed.set()  # its sampler agent waits for this to unload the version


class Fleet:
    """All replicas."""

    def __init__(self, api_key: str = "", serving_share: float = 0.5) -> None:
        """`api_key` is sent to every server; empty sends none. `serving_share`: the setting of
        `gateway.replicas`."""
        self._api_key, self._serving_share = api_key, serving_share
        self.replicas: list[Replica] = []
        self._departed: list[Replica] = []
        """Replicas that were removed and still have calls in flight."""
        self.wanted: dict[str, float] = {}
        """Versions that calls wait for and no replica serves, with the `time.monotonic` of the last such call."""
        self.used: dict[str, float] = {}
        """Versions with an adapter, with the `time.monotonic` of the last call that used them."""
        self.use_changed = asyncio.Event()
        """Set to have this gateway's use of versions reported to the sampler agents now."""
        self.closing = False
        self._changed = asyncio.Event()

    def add(self, url: str) -> Replica:
        """Add the replica at `url`, or return it if it is known."""
        name = replica_name(url)
        known = next(
            (r for r in (*self.replicas, *self._departed) if r.upstream.url == url.rstrip("/")), None
        )
        replica = known or Replica(url, self._api_key)
        self._departed = [r for r in self._departed if r is not replica]
        self.replicas = sorted([*(r for r in self.replicas if r.name != name), replica], key=lambda r: r.name)
        return replica

    def remove(self, replica: Replica) -> None:
        """Send no further call to `replica`. Calls in flight continue."""
        replica.leave()
        self.replicas = [r for r in self.replicas if r is not replica]
        kept = [r for r in (*self._departed, replica) if r.load]
        for gone in (*self._departed, replica):
            if gone not in kept:
                gone.upstream.close()
        self._departed = kept
        self.changed()

    def close(self) -> None:
        """From now on, a call that no replica can take at once gets a 503."""
        self.closing = True
        self.changed()

    def disconnect(self) -> None:
        """Close the connections to all servers."""
        for replica in (*self.replicas, *self._departed):
            replica.upstream.close()

    def ready(self) -> list[Replica]:
        return [r for r in self.replicas if r.ready]

    def change(self) -> asyncio.Event:
        """The event that is set at the next change of a replica."""
        return self._changed

    def changed(self) -> None:
        """Wake the tasks that wait for a replica or a version."""
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def want(self, version: str) -> None:
        """Have the sampler agents load `version`."""
        if version not in self.wanted:
            self.use_changed.set()
        self.wanted[version] = time.monotonic()

    def available(self, version: str) -> bool:
        """Whether enough replicas hold `version` for its model's name to move to it: `gateway.replicas.serving_share`
        of those that take calls for the model, at least one."""
        model = version.rpartition("@")[0]
        ready = [r for r in self.replicas if r.ready and r.serves_model(model)]
        needed = max(1, math.ceil(self._serving_share * len(ready) - 1e-9))
        return sum(r.holds(version) for r in ready) >= needed

    def refused(self) -> dict[str, str]:
        """The versions that failed a check on every registered replica, with the reason of one of them."""
        candidates = self.replicas[0].refused if self.replicas else {}
        return {v: why for v, why in candidates.items() if all(v in r.refused for r in self.replicas)}

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
                    self.used[version] = time.monotonic()
                return Lease(self, replica, version)
            if self.closing:
                raise stopping()
            any_ready = bool(self.ready())
            if any_ready:
                self.want(version)
            if not await self._wait(deadline):
                why = (
                    "it was not loaded in time"
                    if any_ready
                    else "none is registered and up; the gateway keeps checking"
                )
                raise ApiError(503, "no_replica", f"No inference server is ready to serve {version}: {why}.")

    async def until_available(self, version: str, deadline: float) -> bool:
        """Wait until `version` is `available`. Returns false at the deadline, by `time.monotonic`."""
        while not self.available(version):
            self.want(version)
            if not await self._wait(deadline):
                return False
        return True

    async def _wait(self, deadline: float) -> bool:
        """Wait for a change. Returns false at the deadline."""
        changed = self._changed
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await changed.wait()
        except TimeoutError:
            return False
        return True


def least_loaded(replicas: list[Replica]) -> Replica:
    """Return the replica with the fewest calls in flight for its capacity."""
    return min(replicas, key=lambda r: r.load / r.capacity)


def replica_of(conversation: str, replicas: list[Replica]) -> Replica:
    """Return the replica of a conversation: the same one at every gateway for the same replicas, so that the server's
    prefix cache holds the conversation. When replicas come or go, only the conversations of those move."""
    key = conversation.encode()
    return max(replicas, key=lambda r: r.score(key))
