"""The inference servers: their state, the adapters that they hold, and the choice of one for a call.

A call holds a `Lease` on one replica and one exact version while it runs. The gateway reports the leased versions to
the sampler agents (`rollout_gateway.serving.membership`), so a version is unloaded only after the last call that uses
it. `Fleet.acquire` waits while no replica can serve, so an agent program sees a delay, not an error, when a server
restarts.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from anyio import CancelScope

from pipeline.names import is_base_version
from pipeline.streams import replica_name
from rollout_gateway.http.errors import ApiError, stopping
from rollout_gateway.http.upstream import Upstream


class Replica:
    """One inference server."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.upstream = Upstream(url, api_key=api_key)
        self.name = replica_name(url)
        self.ready = False
        """Whether it takes calls: it is registered, healthy, and still the process that was registered."""
        self.problem = ""
        """Why it does not take calls, by the last check; empty if it does."""
        self.server_start = ""
        """Start time of the server process that the sampler agent registered, which identifies the process."""
        self.models: tuple[str, ...] = ()
        """Names of the models that it serves; empty if it serves all."""
        self.refused: dict[str, str] = {}
        """Versions that failed a check here, with the reason."""
        self.loaded: dict[str, str] = {}
        """By loaded version, the SHA-256 of its adapter, according to the log. Base versions have no adapter."""
        self.in_flight: Counter[str] = Counter()
        """Number of calls in flight by version."""
        self.shadows: set[CancelScope] = set()
        """Shadow calls in flight, which are also in `in_flight`. The next agent's call breaks them off."""
        self.check_now = asyncio.Event()
        """Set to make `Membership` check the server now."""

    @property
    def load(self) -> int:
        """Number of calls in flight."""
        return self.in_flight.total()

    def serves(self, version: str) -> bool:
        """Whether it can take a call for `version` now."""
        return self.ready and self.holds(version)

    def holds(self, version: str) -> bool:
        """Whether it has loaded `version`, or `version` is the base version of a model that it serves."""
        if is_base_version(version):
            return self.serves_model(version[:-2])
        return version in self.loaded

    def serves_model(self, model: str) -> bool:
        """Whether the server has the base model of `model`."""
        return not self.models or model in self.models

    def suspect(self) -> None:
        """Send it no calls until `Membership` has checked it, because it may have crashed or lost its adapters."""
        self.ready = False
        self.check_now.set()


@dataclass(eq=False, slots=True)
class Lease:
    """A running call's use of a version at a replica. The version is not unloaded there until `release`."""

    fleet: Fleet
    replica: Replica
    version: str

    def release(self) -> None:
        """End the use. If a sampler agent may be waiting for that, have this gateway's record written now."""
        in_flight = self.replica.in_flight
        in_flight[self.version] -= 1
        if in_flight[self.version] <= 0:
            del in_flight[self.version]
            reported = self.version in self.fleet.reported.get(self.replica.name, ())
            if reported or not self.replica.holds(self.version):
                self.fleet.use_changed.set()  # its sampler agent may wait for this to unload the version
            self.fleet.idle.set()


class Fleet:
    """All replicas."""

    def __init__(self, api_key: str = "", serving_share: float = 0.5) -> None:
        """`api_key`: sent to every server; empty for none. `serving_share`: the setting
        `gateway.replicas.serving_share`, used by `available`."""
        self._api_key, self._serving_share = api_key, serving_share
        self.replicas: list[Replica] = []
        self._departed: list[Replica] = []
        """Replicas that were removed and still have calls in flight."""
        self._closings: set[asyncio.Task[None]] = set()
        """Tasks that close the connections to replicas that were removed."""
        self.wanted: dict[str, float] = {}
        """Versions that calls wait for because no replica serves them, with the time at which a call last asked for it,
        by `time.monotonic`."""
        self.use_changed = asyncio.Event()
        """Set to make `Membership` write this gateway's record now."""
        self.reported: dict[str, tuple[str, ...]] = {}
        """By replica, the versions that calls used according to the record that was written last."""
        self.closing = False
        """The gateway stops: no call waits for a replica any more."""
        self.idle = asyncio.Event()
        """Set when a server may have no call in flight any more, or takes calls again; `Shadows` clears it."""
        self._changed = asyncio.Event()
        """Set, and replaced by a new one, at each change of a replica or a version."""

    def add(self, url: str) -> Replica:
        """Add the replica at `url`, or return it if it is known."""
        existing = next((r for r in (*self.replicas, *self._departed) if r.upstream.url == url.rstrip("/")), None)
        replica = existing or Replica(url, self._api_key)
        self._departed = [r for r in self._departed if r is not replica]
        others = (r for r in self.replicas if r.name != replica.name)
        self.replicas = sorted([*others, replica], key=lambda r: r.name)
        return replica

    def remove(self, replica: Replica) -> None:
        """Send no further call to `replica`. Calls in flight continue. Close the connections to all replicas that were
        removed and have no call in flight."""
        replica.ready = False
        self.replicas = [r for r in self.replicas if r is not replica]
        departed = (*self._departed, replica)
        self._departed = [r for r in departed if r.load]
        for idle in departed:
            if not idle.load:
                self._closings.add(closing := asyncio.ensure_future(idle.upstream.close()))
                closing.add_done_callback(self._closings.discard)
        self.changed()

    def close(self) -> None:
        """From now on, refuse calls that no replica can take at once with a 503, instead of having them wait."""
        self.closing = True
        self.changed()

    async def disconnect(self) -> None:
        """Close the connections to all servers."""
        for replica in (*self.replicas, *self._departed):
            await replica.upstream.close()

    def ready_replicas(self) -> list[Replica]:
        """Return the replicas that take calls."""
        return [r for r in self.replicas if r.ready]

    def changed(self) -> None:
        """Wake the tasks that wait for a replica or a version."""
        event, self._changed = self._changed, asyncio.Event()
        event.set()
        self.idle.set()

    def want(self, version: str) -> None:
        """Note that a call waits for `version`. This gateway's record tells the sampler agents, so that they load
        it."""
        if version not in self.wanted:
            self.use_changed.set()
        self.wanted[version] = time.monotonic()

    def available(self, version: str) -> bool:
        """Return whether enough replicas hold `version` to route its model name to it: the share
        `gateway.replicas.serving_share` of the replicas that are ready to serve the model, and at least one."""
        model = version.rpartition("@")[0]
        ready = [r for r in self.replicas if r.ready and r.serves_model(model)]
        needed = max(1, math.ceil(self._serving_share * len(ready) - 1e-9))
        return sum(r.holds(version) for r in ready) >= needed

    def refused_versions(self) -> dict[str, str]:
        """Return the versions that failed a check on every registered replica, each with the first replica's reason."""
        candidates = self.replicas[0].refused if self.replicas else {}
        return {v: why for v, why in candidates.items() if all(v in r.refused for r in self.replicas)}

    async def acquire(
        self, resolve: Callable[[], str], prefer: Callable[[list[Replica]], Replica], deadline: float
    ) -> Lease:
        """Wait for a replica that serves a version, and return a lease on both.

        `resolve` returns the version; it is called again after each change. `prefer` chooses among several replicas.
        `deadline`: by `time.monotonic`. Raises a 503 `ApiError` at the deadline or if the gateway stops, and the errors
        of `resolve`."""
        while True:
            version = resolve()
            serving = [r for r in self.replicas if r.serves(version)]
            if serving:
                replica = prefer(serving)
                for shadow in replica.shadows:  # an agent's call goes first
                    shadow.cancel()
                replica.in_flight[version] += 1
                return Lease(self, replica, version)
            if self.closing:
                raise stopping()
            any_ready = bool(self.ready_replicas())
            if any_ready:
                self.want(version)
            if not await self._wait(deadline):
                why = (
                    "the version was not loaded in time; the sampler agents' logs say why"
                    if any_ready
                    else "; ".join(f"{r.name}: {r.problem or 'not checked yet'}" for r in self.replicas)
                    or "none is registered; the sampler agents' logs say why"
                )
                raise ApiError(503, "no_replica", f"No inference server is ready to serve {version}: {why}.")

    def acquire_idle(self, version: str) -> Lease | None:
        """Return a lease for a shadow call: on a server that serves `version` and answers no agent's call, with the
        fewest shadow calls. `None` if there is none now."""
        idle = [r for r in self.replicas if r.serves(version) and r.load == len(r.shadows)]
        if not idle or self.closing:
            return None
        replica = least_loaded(idle)
        replica.in_flight[version] += 1
        return Lease(self, replica, version)

    async def until_available(self, version: str, deadline: float) -> bool:
        """Wait until `version` is `available`. Return false if it is not at the deadline (by `time.monotonic`)."""
        while not self.available(version):
            self.want(version)
            if not await self._wait(deadline):
                return False
        return True

    async def _wait(self, deadline: float) -> bool:
        """Wait for a change of a replica. Return false if there is none before the deadline."""
        changed = self._changed
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await changed.wait()
        except TimeoutError:
            return False
        return True


def least_loaded(replicas: list[Replica]) -> Replica:
    """Return the replica with the fewest calls in flight."""
    return min(replicas, key=lambda r: r.load)


def replica_of(conversation: str, replicas: list[Replica]) -> Replica:
    """Return the replica for a conversation, by rendezvous hashing: the one for which the hash of its name and
    the conversation is largest.

    All gateways choose the same one, so the server's prefix cache holds the conversation. When a replica is added or
    removed, only the conversations of that replica move."""
    return max(replicas, key=lambda r: hashlib.sha256(f"{r.name}\0{conversation}".encode()).digest())
