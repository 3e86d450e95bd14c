"""Maintains the list of replicas, checks their health, and reports to sampler agents which versions this gateway uses.

A replica is an inference server. It joins when its sampler agent, a process beside it, writes a record for it to the
key-value bucket FLEET, and leaves when the record is deleted or expires. `service` starts `Membership.run`.

Sampler agents load and unload adapters. The gateway reads from `policy.loaded` and `policy.unloaded` events which
versions a replica holds. Before an agent unloads a version, it publishes `policy.unloaded` and waits until the record
of every gateway shows that the gateway has applied the event and that no call uses the version on that replica.
"""

from __future__ import annotations

import time

import anyio
import anyio.abc
import msgspec

from pipeline import streams
from pipeline.config import Config
from pipeline.events import Event, PolicyLoaded, PolicyUnloaded
from pipeline.log import key_value
from pipeline.log.broker import Broker, BrokerError
from pipeline.streams import gateway_key, sampler_key
from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.upstream import UpstreamError
from rollout_gateway.serving import server_state
from rollout_gateway.serving.fleet_records import GatewayRecord, SamplerRecord
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.replicas import Fleet, Replica
from rollout_gateway.serving.routing import VersionRouter

logger = get_logger("rollout_gateway.serving.membership")

_BUCKET = streams.FLEET.name
_WANTED_S = 3.0
"""How long a version is reported as wanted after a call has asked for it. A waiting call asks again after each health
check."""


class Membership:
    """Updates the replicas of a fleet and writes this gateway's record."""

    def __init__(
        self, config: Config, broker: Broker, policies: Policies, fleet: Fleet, router: VersionRouter, gateway: str
    ) -> None:
        """`gateway`: the id of this gateway process, unique in the project."""
        self._settings, self._ttl_s = config.gateway.replicas, config.sampler.ttl_s
        self._broker, self._policies, self._fleet, self._router = broker, policies, fleet, router
        self._serving: tuple[str, ...] = ()
        """The versions that model names resolved to at the last change."""
        self._samplers = sampler_key(config.project, "*")
        self._key = gateway_key(config.project, gateway)
        self._registered: dict[str, tuple[Replica, anyio.CancelScope]] = {}
        """By the key of a sampler agent's record in the bucket, the replica and the cancel scope of the task that
        checks it."""

    async def run(self) -> None:
        """Follow the records of sampler agents, check replicas and write this gateway's record, until cancelled. Then
        remove the record."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._report)
                async for key, value in key_value.follow(self._broker, _BUCKET, self._samplers):
                    self._apply_record(key, value, tasks)
        finally:
            with anyio.move_on_after(2, shield=True):
                try:
                    await key_value.delete(self._broker, _BUCKET, self._key)
                except BrokerError as error:
                    logger.warning("the gateway's record stays until it expires", error=str(error))

    def policies_changed(self, event: Event) -> None:
        """Update the replicas after `policies` has applied `event`."""
        for replica in self._fleet.replicas:
            replica.loaded = self._policies.loaded(replica.name, replica.server_start)
        if isinstance(event, PolicyLoaded | PolicyUnloaded):
            for replica in self._fleet.replicas:
                if replica.name == event.replica and not replica.ready:
                    replica.check_now.set()  # it may have loaded again the adapters that it had lost
            self._fleet.use_changed.set()  # the agents wait until this gateway's record shows the event
        self._replicas_changed()

    def _replicas_changed(self) -> None:
        """After a change of a replica or a policy: wake the calls that wait for a version, and have this gateway's
        record written if model names resolve to other versions now."""
        if (serving := self._router.served_versions()) != self._serving:
            self._serving = serving
            self._fleet.use_changed.set()
        self._fleet.changed()

    # -- replicas --------------------------------------------------------------------------------------------------

    def _apply_record(self, key: str, value: bytes, tasks: anyio.abc.TaskGroup) -> None:
        """Apply a sampler agent's record. An empty value means that the record was deleted or has expired."""
        if not value:
            self._remove(key)
            return
        try:
            record = msgspec.json.decode(value, type=SamplerRecord)
            replica = self._fleet.add(record.url)
        except (msgspec.DecodeError, ValueError) as error:
            logger.error("record of a sampler agent ignored: it is not valid", key=key, error=str(error))
            return
        if key in self._registered and self._registered[key][0] is not replica:
            self._remove(key)  # the URL has changed, but not the name in the key, which leaves out the scheme
        known = key in self._registered
        restarted = replica.server_start != record.server_start
        replica.server_start, replica.models = record.server_start, record.models
        replica.refused = dict(record.refused)
        replica.loaded = self._policies.loaded(replica.name, record.server_start)
        self._policies.refused = self._fleet.refused_versions()
        if not known:
            logger.info("replica joined", replica=replica.name, server_start=record.server_start)
            scope = anyio.CancelScope()
            self._registered[key] = replica, scope
            tasks.start_soon(self._check, replica, scope)
        elif restarted:
            replica.suspect()
        self._replicas_changed()

    def _remove(self, key: str) -> None:
        """Remove the replica of the sampler agent's record `key` from the fleet. Does nothing if the record was not
        valid."""
        registered = self._registered.pop(key, None)
        if registered is not None:
            replica, scope = registered
            logger.warning(
                "replica left: its sampler agent has stopped, can't reach its server, or names another URL",
                replica=replica.name,
            )
            scope.cancel()
            self._fleet.remove(replica)
            self._policies.refused = self._fleet.refused_versions()

    async def _check(self, replica: Replica, scope: anyio.CancelScope) -> None:
        """Check a replica again and again until `scope` is cancelled: its health, or, while it takes no calls, whether
        it may take some."""
        with scope:
            while True:
                replica.check_now.clear()
                try:
                    if replica.ready:
                        await server_state.check_health(replica.upstream)
                    else:
                        await self._handshake(replica)
                    pause_s = self._settings.health_interval_s
                except (UpstreamError, msgspec.DecodeError) as error:
                    if replica.problem != str(error):
                        logger.warning("replica takes no calls", replica=replica.name, error=str(error))
                    replica.ready, replica.problem = False, str(error)
                    pause_s = self._settings.health_retry_s
                self._replicas_changed()
                with anyio.move_on_after(pause_s):
                    await replica.check_now.wait()

    async def _handshake(self, replica: Replica) -> None:
        """Mark the replica ready if the server is healthy, is the process that its agent registered, and holds the
        adapters that the log says it has loaded.

        Raises `UpstreamError` if not, and `msgspec.DecodeError`."""
        await server_state.check_health(replica.upstream)
        started = await server_state.process_start_time(replica.upstream)
        loaded = await server_state.loaded_adapters(replica.upstream)
        if started and started != replica.server_start:
            raise UpstreamError("it was restarted, and its sampler agent has not registered it since")
        if lost := replica.loaded.keys() - loaded.keys():
            raise UpstreamError(f"it lost {', '.join(sorted(lost))}; its sampler agent loads it again")
        logger.info("replica ready", replica=replica.name, server_start=replica.server_start)
        replica.ready, replica.problem = True, ""

    # -- this gateway's record ---------------------------------------------------------------------------------------

    async def _report(self) -> None:
        """Write this gateway's record, by which sampler agents know the versions in use, when it changes and before it
        expires. Never returns."""
        while True:
            self._fleet.use_changed.clear()
            try:
                record = msgspec.json.encode(self._own_record())
                await key_value.put(self._broker, _BUCKET, self._key, record, self._ttl_s)
            except BrokerError as error:
                logger.warning("the gateway's record was not renewed", error=str(error))
            with anyio.move_on_after(self._ttl_s / 3):
                await self._fleet.use_changed.wait()

    def _own_record(self) -> GatewayRecord:
        """This gateway's record as of now. What it reports as in flight is remembered: `Lease.release` compares with
        it."""
        fleet, now = self._fleet, time.monotonic()
        fleet.wanted = {v: at for v, at in fleet.wanted.items() if now - at < _WANTED_S}
        fleet.reported = {r.name: tuple(r.in_flight) for r in fleet.replicas if r.in_flight}
        return GatewayRecord(
            policy_seq=self._policies.next_seq - 1,
            serving=self._router.served_versions(),
            wanted=tuple(sorted(fleet.wanted, key=lambda v: -fleet.wanted[v])),
            in_flight=fleet.reported,
        )
