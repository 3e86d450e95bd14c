"""Keeps one inference server: from a published checkpoint to an adapter that serves.

The keeper finds out whether the server is up and whether it was restarted, and loads the adapters that are wanted:
download, SHA-256, unpack, load, probe, `policy.loaded`. It registers the server on the log when the server holds them,
and removes the record when the server is lost. An adapter is loaded once under its versioned name and never replaced in
place. Its folder's name holds its SHA-256, so an agent that restarts recognises what the server has loaded.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import anyio
import msgspec

from pipeline import crash, streams
from pipeline.config import Config
from pipeline.events import PolicyLoaded, PolicyUnloaded, now_us
from pipeline.log import key_value
from pipeline.log.broker import Broker, BrokerError
from pipeline.names import InvalidNameError, parse_version
from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.upstream import Upstream, UpstreamError
from rollout_gateway.sampler import adapter_api
from rollout_gateway.sampler.adapter_files import AdapterError, AdapterFiles
from rollout_gateway.sampler.gateways import Gateways
from rollout_gateway.serving import server_state
from rollout_gateway.serving.fleet_records import SamplerRecord, replica_name, sampler_key
from rollout_gateway.serving.policies import Checkpoint, Policies

log = get_logger("rollout_gateway.sampler.keeper")

_UNFINISHED_S = 0.5
"""Time until a load that did not succeed is tried again."""


@contextlib.contextmanager
def _contained(version: str) -> Iterator[None]:
    """Turn an unexpected error while `version` is loaded into an `AdapterError`. One version's fault must not end the
    agent, which loads the others. Failures of the server and of the log pass: `Keeper.run` handles them."""
    try:
        yield
    except (AdapterError, UpstreamError, msgspec.DecodeError, BrokerError):
        raise
    except OSError as error:  # such as a full disk
        raise AdapterError(f"{type(error).__name__}: {error}", lasting=False) from error
    except Exception as error:
        log.error("unexpected error while an adapter was loaded", version=version, exc=error)
        message = (
            f"loading it failed unexpectedly ({type(error).__name__}); the sampler agent's log says more"
        )
        raise AdapterError(message, lasting=True) from error


@dataclass(eq=False)
class Agent:
    """What the keepers of a process share."""

    config: Config
    broker: Broker
    policies: Policies
    gateways: Gateways
    files: AdapterFiles
    probe: adapter_api.Probe
    api_key: str = ""
    """API key of the inference servers; empty if they need none."""


class Keeper:
    """Keeps one inference server."""

    def __init__(self, agent: Agent, url: str, advertised: str, release_files: Callable[[str], None]) -> None:
        """`url`: where this process reaches the server; `advertised`: where gateways do. `release_files` is called with
        the folder of an adapter that was unloaded."""
        self._agent, self._config, self._policies = agent, agent.config, agent.policies
        self._server = Upstream(url, api_key=agent.api_key)
        self._advertised, self._release_files = advertised, release_files
        self.name = replica_name(advertised)
        """Name of the server, the same as at the gateways."""
        self._key = sampler_key(agent.config.project, self.name)
        self._up = False
        self._complete = False
        """Whether the server has everything loaded that was wanted when it came up. Only then it is registered."""
        self._incarnation = ""
        self._checked = 0.0
        """Time of the last health check, by `time.monotonic`."""
        self.loaded: dict[str, str] = {}
        """Folders of the loaded adapters, by version."""
        self._unloading: dict[str, int] = {}
        """Loaded versions to which gateways send no further calls, with the sequence of their `policy.unloaded`."""
        self._lost: set[str] = set()
        """Versions that the server lost and the log says it has. A gateway that has noticed sends the server no calls
        until that is put right."""
        self._refused: dict[str, tuple[str, str]] = {}
        """Versions that failed a check: the adapter's SHA-256 and the reason."""
        self._record: SamplerRecord | None = None
        """What is on the log; `None` if the server is not registered."""
        self._writing = anyio.Lock()
        self.work = anyio.Event()
        """Set to have versions loaded and unloaded now."""

    async def run(self) -> None:
        """Keep the server. Never returns. When cancelled, removes the server's record."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._renew)
                await self._keep()
        finally:
            with anyio.move_on_after(2, shield=True):
                await self._unregister()
            self._server.close()

    async def _keep(self) -> None:
        settings = self._config.gateway.replicas
        while True:
            self.work = anyio.Event()
            try:
                if not self._up:
                    await self._handshake()
                elif time.monotonic() - self._checked >= settings.health_interval_s:
                    await self._check()
                done = await self._load_wanted()
                self._complete = self._complete or done
                if self._complete:
                    await self._register()
                pause_s = settings.health_interval_s if done else _UNFINISHED_S
            except (UpstreamError, msgspec.DecodeError) as error:
                if self._up:
                    log.warning("inference server lost", replica=self.name, error=str(error))
                self._up = self._complete = False
                await self._unregister()
                pause_s = settings.health_retry_s
            except BrokerError as error:
                log.warning("adapters wait for the log", replica=self.name, error=str(error))
                pause_s = 1.0
            with anyio.move_on_after(pause_s):
                await self.work.wait()

    # -- the server's record -----------------------------------------------------------------------------------------

    async def _register(self) -> None:
        """Write the server's record if it has changed."""
        sampler = self._config.sampler
        record = SamplerRecord(
            url=self._advertised, models=tuple(self._policies.models), incarnation=self._incarnation,
            capacity=sampler.capacity, refused=self._refusals(),
        )  # fmt: skip
        if record != self._record:
            if self._record is None:
                log.info("inference server registered", replica=self.name, incarnation=self._incarnation)
            self._record = record
            await self._write()

    async def _renew(self) -> None:
        """Write the record again before it expires, also while an adapter is loaded. Never returns."""
        while True:
            await anyio.sleep(self._config.sampler.ttl_s / 4)
            try:
                await self._write()
            except BrokerError as error:
                log.warning("the server's record was not renewed", replica=self.name, error=str(error))

    async def _write(self) -> None:
        async with self._writing:  # one after the other, so that the log ends with the latest
            if self._record is not None:
                value, ttl_s = msgspec.json.encode(self._record), self._config.sampler.ttl_s
                await key_value.put(self._agent.broker, streams.FLEET.name, self._key, value, ttl_s)

    async def _unregister(self) -> None:
        """Remove the server's record."""
        if self._record is None:
            return
        self._record = None
        async with self._writing:
            try:
                await key_value.delete(self._agent.broker, streams.FLEET.name, self._key)
            except BrokerError as error:
                log.warning("the server's record stays until it expires", replica=self.name, error=str(error))

    def _refusals(self) -> dict[str, str]:
        """Return the versions that failed a check and were not published again with another adapter since."""
        return {v: why for v, (sha256, why) in self._refused.items() if self._policies.published(v, sha256)}

    # -- the server ------------------------------------------------------------------------------------------------

    async def _check(self) -> None:
        """Check that the server is up, was not restarted and has not lost adapters. Raises `UpstreamError`,
        `msgspec.DecodeError`."""
        await server_state.check_health(self._server)
        found = await server_state.loaded_adapters(self._server)
        self._checked = time.monotonic()
        # A restart loses the adapters. Where none is loaded, only the process tells; its metrics cost the server more.
        if not self.loaded or not self.loaded.keys() <= found.keys():
            await self._handshake()

    async def _handshake(self) -> None:
        """Find out whether the server is up, whether it was restarted and which adapters it has loaded.

        Raises `UpstreamError`, `msgspec.DecodeError`, `BrokerError`."""
        await server_state.check_health(self._server)
        incarnation = await server_state.process_start_time(self._server)
        found = await server_state.loaded_adapters(self._server)
        lost = self.loaded.keys() - found.keys()
        if not incarnation:  # a server without metrics: losing its adapters is the only sign of a restart
            incarnation = self._incarnation if self._incarnation and not lost else f"{time.time():.3f}"
        if incarnation != self._incarnation:
            if self._incarnation:
                log.warning("inference server restarted", replica=self.name, incarnation=incarnation)
            self._complete = False
            for versions in (self.loaded, self._unloading, self._lost):
                versions.clear()
        self._incarnation, self._checked = incarnation, time.monotonic()
        for version in lost & self.loaded.keys():
            log.warning("the inference server lost an adapter", replica=self.name, version=version)
            del self.loaded[version]
            self._unloading.pop(version, None)
            self._lost.add(version)
        for version, folder in found.items():
            if version not in self.loaded:
                await self._adopt(version, folder)
        self._up = True

    async def _adopt(self, version: str, folder: str) -> None:
        """Take over an adapter that the server had loaded before, if it is the published one. Otherwise unload it."""
        try:
            model, _ = parse_version(version)
        except InvalidNameError:
            return
        if model not in self._policies.models:
            return
        known = self._policies.checkpoint(version)
        if known is not None and self._agent.files.is_published(known.event, folder):
            if version in self._policies.loaded(self.name, self._incarnation):  # its proof is on the log
                self.loaded[version] = folder
                return
            try:
                with _contained(version):
                    await self._verify(known, folder, now_us())
                return
            except AdapterError as error:
                log.warning("adapter not taken over", version=version, error=str(error))
        await adapter_api.unload(self._server, version)

    # -- versions --------------------------------------------------------------------------------------------------

    def wanted(self) -> list[str]:
        """Return the versions to hold, the most wanted first: those that names stand for, then those that calls wait
        for."""
        refused = self._refusals()
        out: list[str] = []
        for model in self._policies.models.values():
            if model.promoted is not None:
                out += [model.promoted.version, *([model.promoted.other] if model.promoted.other else [])]
            out.append(self._policies.newest(model.name, refused))
        out += self._agent.gateways.wanted()
        known = (
            v for v in dict.fromkeys(out) if v not in refused and self._policies.checkpoint(v) is not None
        )
        return list(known)[: self._config.vllm.max_loras]

    async def _load_wanted(self) -> bool:
        """Load the wanted versions that are missing. Returns false if some must be tried again soon."""
        done = await self._unload_replaced()
        for version in self.wanted():
            checkpoint = self._policies.checkpoint(version)
            if checkpoint is None or (version in self.loaded and version not in self._unloading):
                continue
            if version in self._unloading and not await self._unload_released(version):
                done = False
                continue
            if not await self._make_room():
                return False
            try:
                await self._load(checkpoint)
            except AdapterError as error:
                log.error("adapter not loaded", version=version, replica=self.name, error=str(error))
                if error.lasting:
                    self._refused[version] = checkpoint.event.adapter_sha256, str(error)
                else:
                    done = False
        for version in self._lost - self.loaded.keys():
            await self._publish_unloaded(version)
        self._lost.clear()
        return done

    async def _unload_replaced(self) -> bool:
        """Unload versions that were published again with another adapter, after a power cut that took the log's end and
        the trainer's disk. Returns false while calls still use one."""
        done = True
        for version, folder in list(self.loaded.items()):
            known = self._policies.checkpoint(version)
            if known is None or self._agent.files.is_published(known.event, folder):
                continue
            await self._begin_unloading(version)
            done = await self._unload_released(version) and done
        return done

    async def _make_room(self) -> bool:
        """If the server is full, unload the version that was unused longest. Returns false while calls use all that may
        be unloaded."""
        for version in list(self._unloading):
            await self._unload_released(version)
        wanted, gateways = self.wanted(), self._agent.gateways
        while len(self.loaded) >= self._config.vllm.max_loras:
            if not self._unloading:
                idle = [v for v in self.loaded if v not in wanted and not gateways.using(self.name, v)]
                if not idle:
                    return False
                await self._begin_unloading(max(idle, key=lambda v: (gateways.age(v), -parse_version(v)[1])))
            for version in list(self._unloading):
                if not await self._unload_released(version):
                    return False
        return True

    async def _begin_unloading(self, version: str) -> None:
        """Have gateways send no further calls for the version to this server."""
        if version not in self._unloading:
            self._unloading[version] = await self._publish_unloaded(version)

    async def _publish_unloaded(self, version: str) -> int:
        """Publish `policy.unloaded`; return its sequence."""
        # Retention keeps the adapters that a server holds in the object store.
        event = PolicyUnloaded(
            project=self._config.project, model=parse_version(version)[0], version=version, replica=self.name,
            incarnation=self._incarnation,
        )  # fmt: skip
        return (await self._agent.broker.publish(event)).seq

    async def _unload_released(self, version: str) -> bool:
        """Unload a version if no call uses it. Returns false if one does, or a gateway has not answered yet."""
        if not self._agent.gateways.released(self.name, version, self._unloading[version]):
            return False
        await adapter_api.unload(self._server, version)
        folder = self.loaded.pop(version)
        del self._unloading[version]
        log.info("adapter unloaded", version=version, replica=self.name)
        await anyio.to_thread.run_sync(self._release_files, folder)
        return True

    async def _load(self, checkpoint: Checkpoint) -> None:
        started_at = now_us()
        event, version = checkpoint.event, checkpoint.event.version
        with _contained(version):
            folder = await self._agent.files.ensure(version, event.adapter, event.adapter_sha256, event.files)
            await adapter_api.load(self._server, version, str(folder))
        try:
            with _contained(version):
                await self._verify(checkpoint, str(folder), started_at)
        except AdapterError:
            await adapter_api.unload(self._server, version)
            raise

    async def _verify(self, checkpoint: Checkpoint, folder: str, started_at: int) -> None:
        """Probe a loaded adapter and publish `policy.loaded`, by which gateways send calls for it to this server.

        Raises `AdapterError`, `UpstreamError`, `BrokerError`."""
        version = checkpoint.event.version
        model, step = parse_version(version)
        delta = await self._agent.probe.delta(self._server, self._incarnation, model, version)
        if delta == 0.0:
            message = "the adapter changes nothing: its logprobs equal the base model's"
            if self._config.gateway.replicas.probe == "require":
                raise AdapterError(message, lasting=True)
            log.warning(message, version=version, replica=self.name)
        event = PolicyLoaded(
            project=self._config.project,
            model=model,
            step=step,
            version=version,
            replica=self.name,
            adapter_sha256=checkpoint.event.adapter_sha256,
            probe_delta=delta,
            load_s=(now_us() - started_at) / 1e6,
            started_at=started_at,
            incarnation=self._incarnation,
        )
        headers = {"traceparent": checkpoint.traceparent} if checkpoint.traceparent else {}
        crash.point("sampler.adapter_loaded")
        await self._agent.broker.publish(event, headers)
        self.loaded[version] = folder
        log.info("adapter loaded", version=version, replica=self.name, delta=delta, load_s=event.load_s)
