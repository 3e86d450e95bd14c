"""From a published checkpoint to an adapter that serves on every replica.

Each replica has a keeper task. It finds out whether the server is up and whether it was restarted, loads the adapters
that are wanted (download, SHA-256, unpack, load, probe, `policy.loaded`), and only then lets the replica take calls. An
adapter is loaded once under its versioned name and never replaced in place. Its folder's name holds its digest, so a
gateway that restarts recognises what a server already holds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import anyio
import msgspec

from pipeline import crash
from pipeline.config import Config
from pipeline.events import PolicyLoaded, PolicyUnloaded, now_us
from pipeline.log.broker import Broker, BrokerError
from pipeline.names import InvalidNameError, parse_version
from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.upstream import UpstreamError
from rollout_gateway.serving import adapter_api
from rollout_gateway.serving.adapter_files import AdapterError, AdapterFiles
from rollout_gateway.serving.policies import Checkpoint, Policies
from rollout_gateway.serving.replicas import Fleet, LoadedAdapter, Replica

log = get_logger("rollout_gateway.serving.adapters")


@contextlib.contextmanager
def _contained(version: str) -> Iterator[None]:
    """Turn an unexpected error while `version` is loaded into an `AdapterError`. One version's fault must not end the
    gateway, which serves the others. Failures of the server and of the log pass: `_keep` handles them."""
    try:
        yield
    except (AdapterError, UpstreamError, msgspec.DecodeError, BrokerError):
        raise
    except OSError as error:  # such as a full disk
        raise AdapterError(f"{type(error).__name__}: {error}", lasting=False) from error
    except Exception as error:
        log.error("unexpected error while an adapter was loaded", version=version, exc=error)
        message = f"loading it failed unexpectedly ({type(error).__name__}); the gateway's log says more"
        raise AdapterError(message, lasting=True) from error


class AdapterManager:
    """The keepers of all replicas."""

    def __init__(
        self, config: Config, broker: Broker, policies: Policies, fleet: Fleet, gateway: str
    ) -> None:
        """`gateway`: this gateway's id, for the events."""
        self._config, self._broker, self._policies, self._fleet = config, broker, policies, fleet
        self._gateway = gateway
        self._files = AdapterFiles(config.path("adapters"), broker)
        self._probe = adapter_api.Probe()
        self._last_unloaded = ""
        """Path of the adapter that was unloaded last. Its files are kept until the next one is."""
        self.on_loaded: list[Callable[[PolicyLoaded], None]] = []

    async def run(self) -> None:
        """Keep every replica. Never returns."""
        async with anyio.create_task_group() as tg:
            for replica in self._fleet.replicas:
                tg.start_soon(self._keep, replica)

    # -- the server ------------------------------------------------------------------------------------------------

    async def _keep(self, replica: Replica) -> None:
        gateway = self._config.gateway
        while True:
            replica.work.clear()
            try:
                if not replica.up:
                    await self._handshake(replica)
                loaded = await self._load_wanted(replica)
                pause_s = gateway.replicas.health_interval_s if loaded else 0.5
                if loaded and not replica.ready:
                    replica.ready = True
                    log.info("replica ready", replica=replica.name, incarnation=replica.incarnation)
            except (UpstreamError, msgspec.DecodeError) as error:
                if replica.ready or replica.up:
                    log.warning("replica lost", replica=replica.name, error=str(error))
                replica.up = replica.ready = replica.suspected = False
                pause_s = gateway.replicas.health_retry_s
            except BrokerError as error:
                log.warning("adapters wait for the log", replica=replica.name, error=str(error))
                pause_s = 1.0
            self._fleet.changed()
            with anyio.move_on_after(pause_s):
                await replica.work.wait()
            if replica.up:
                try:
                    await adapter_api.check_health(replica)
                except UpstreamError as error:
                    log.warning("replica lost", replica=replica.name, error=str(error))
                    replica.up = replica.ready = False

    async def _handshake(self, replica: Replica) -> None:
        """Find out whether the server is up, whether it was restarted and which adapters it holds. Raises
        `UpstreamError`."""
        await adapter_api.check_health(replica)
        incarnation = await adapter_api.incarnation(replica)
        held = await adapter_api.held_adapters(replica)
        if incarnation != replica.incarnation:
            replica.loaded.clear()
            replica.draining.clear()
        replica.incarnation = incarnation
        for version in [v for v in replica.loaded if v not in held]:
            del replica.loaded[version]
        for version, path in held.items():
            if version not in replica.loaded:
                await self._adopt(replica, version, path)
        replica.up, replica.suspected = True, False

    async def _adopt(self, replica: Replica, version: str, path: str) -> None:
        """Take over an adapter that the server held before, if it is the published one. Otherwise unload it."""
        try:
            model, _ = parse_version(version)
        except InvalidNameError:
            return
        if model not in self._policies.models:
            return
        known = self._policies.checkpoint(version)
        if known is not None and self._files.is_published(known.event, path):
            try:
                with _contained(version):
                    await self._verify(replica, known, path, now_us())
                return
            except AdapterError as error:
                log.warning("adapter not taken over", version=version, error=str(error))
        await adapter_api.unload(replica, version)

    # -- versions --------------------------------------------------------------------------------------------------

    def wanted(self) -> list[str]:
        """Versions to hold, the most wanted first: those that names stand for, then those that requests name
        exactly."""
        out: list[str] = []
        for model in self._policies.models.values():
            if model.promoted is not None:
                out += [model.promoted.version, *([model.promoted.other] if model.promoted.other else [])]
            out.append(self._policies.newest(model.name))
        demanded = self._fleet.demanded
        out += sorted(demanded, key=lambda v: -demanded[v])
        limit = self._config.vllm.max_loras
        return [v for v in dict.fromkeys(out) if self._policies.checkpoint(v) is not None][:limit]

    async def _load_wanted(self, replica: Replica) -> bool:
        """Load the wanted versions that are missing. Returns false if some must be tried again soon."""
        done = await self._drop_replaced(replica)
        for version in self.wanted():
            checkpoint = self._policies.checkpoint(version)
            if checkpoint is None or replica.holds(version) or version in self._policies.refused:
                continue
            if not await self._make_room(replica):
                done = False
                break
            try:
                await self._load(replica, checkpoint)
            except AdapterError as error:
                log.error("adapter refused", version=version, replica=replica.name, error=str(error))
                if error.lasting:
                    self._policies.refused[version] = str(error)
                else:
                    done = False
            self._fleet.changed()
        return done

    async def _drop_replaced(self, replica: Replica) -> bool:
        """Unload versions that were published again with another adapter, after a power cut that took the log's end and
        the trainer's disk. No new call goes to them. Returns false while calls still run on one."""
        done = True
        for version, held in list(replica.loaded.items()):
            known = self._policies.checkpoint(version)
            if known is None or self._files.is_published(known.event, held.path):
                continue
            replica.draining.add(version)
            if replica.in_flight[version]:
                done = False
            else:
                await self._unload(replica, version)
        return done

    async def _make_room(self, replica: Replica) -> bool:
        """If the server is full, unload the version that was unused longest. Returns false if all are in use."""
        wanted = self.wanted()
        while len(replica.loaded) >= self._config.vllm.max_loras:
            idle = [v for v in replica.loaded if not replica.in_flight[v] and v not in wanted]
            if not idle:
                self._fleet.waiting_for_room = True
                return False
            await self._unload(replica, min(idle, key=lambda v: replica.loaded[v].last_used))
        self._fleet.waiting_for_room = False
        return True

    async def _unload(self, replica: Replica, version: str) -> None:
        """Unload an idle version. Its files are deleted when a later one is unloaded."""
        path = replica.loaded[version].path
        replica.draining.add(version)
        self._fleet.demanded.pop(version, None)
        await adapter_api.unload(replica, version)
        del replica.loaded[version]
        replica.draining.discard(version)
        log.info("adapter unloaded", version=version, replica=replica.name)
        before, self._last_unloaded = self._last_unloaded, path
        if before and not any(before == a.path for r in self._fleet.replicas for a in r.loaded.values()):
            await anyio.to_thread.run_sync(self._files.delete, before)
        # Retention keeps the adapters that a replica holds in the object store.
        event = PolicyUnloaded(
            project=self._config.project, model=parse_version(version)[0], version=version, replica=replica.name,
            incarnation=replica.incarnation,
        )  # fmt: skip
        await self._broker.publish(event)

    async def _load(self, replica: Replica, checkpoint: Checkpoint) -> None:
        started_at = now_us()
        event, version = checkpoint.event, checkpoint.event.version
        with _contained(version):
            path = await self._files.ensure(version, event.adapter, event.adapter_sha256, event.files)
            await adapter_api.load(replica, version, str(path))
        try:
            with _contained(version):
                await self._verify(replica, checkpoint, str(path), started_at)
        except AdapterError:
            await adapter_api.unload(replica, version)
            raise

    async def _verify(self, replica: Replica, checkpoint: Checkpoint, path: str, started_at: int) -> None:
        """Probe a loaded adapter, publish `policy.loaded`, then let the version take calls. Raises `AdapterError`."""
        version = checkpoint.event.version
        model, step = parse_version(version)
        delta = await self._probe.delta(replica, model, version)
        if delta == 0.0:
            message = "the adapter changes nothing: its logprobs equal the base model's"
            if self._config.gateway.replicas.probe == "require":
                raise AdapterError(message, lasting=True)
            log.warning(message, version=version, replica=replica.name)
        event = PolicyLoaded(
            project=self._config.project,
            model=model,
            step=step,
            version=version,
            replica=replica.name,
            gateway=self._gateway,
            adapter_sha256=checkpoint.event.adapter_sha256,
            probe_delta=delta,
            load_s=(now_us() - started_at) / 1e6,
            started_at=started_at,
            incarnation=replica.incarnation,
        )
        headers = {"traceparent": checkpoint.traceparent} if checkpoint.traceparent else {}
        crash.point("gateway.adapter_loaded")
        await self._broker.publish(event, headers)
        replica.loaded[version] = LoadedAdapter(path, time.monotonic())
        log.info("adapter loaded", version=version, replica=replica.name, delta=delta, load_s=event.load_s)
        for callback in self.on_loaded:
            callback(event)
