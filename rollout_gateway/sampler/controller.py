"""Controls one inference server: checks its health, loads and unloads its adapters, and registers it for gateways.

To load an adapter, the controller downloads it, compares its SHA-256, unpacks it, has the server load it, probes that
it changes the logprobs, and publishes `policy.loaded`. When the server holds all wanted adapters, the controller
registers it on the log; when the server can't be reached, it removes the record. An adapter is loaded once under its
versioned name and never replaced in place. The name of its folder contains its SHA-256, so an agent that restarts
recognises the adapters that the server has loaded.

`rollout_gateway.sampler.service` runs one controller for each server. A version is a policy's `<model>@<step>`, whose
adapter the trainer published; to adopt an adapter is to take over one that the server had loaded before this agent
started.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import anyio
import msgspec

from pipeline import crash
from pipeline.config import Config
from pipeline.events import PolicyLoaded, PolicyUnloaded, now_us
from pipeline.log.broker import Broker, BrokerError
from pipeline.names import is_version, parse_version, version_name
from pipeline.streams import replica_name
from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.upstream import Upstream, UpstreamError
from rollout_gateway.sampler import adapter_api
from rollout_gateway.sampler.adapter_files import AdapterError, AdapterFiles
from rollout_gateway.sampler.gateway_records import GatewayRecords
from rollout_gateway.sampler.registration import Registration
from rollout_gateway.serving import server_state
from rollout_gateway.serving.fleet_records import SamplerRecord
from rollout_gateway.serving.policies import Checkpoint, Policies

logger = get_logger("rollout_gateway.sampler.controller")

_RETRY_S = 0.5
"""Pause before a load or unload that did not succeed is tried again."""


@contextlib.contextmanager
def _as_adapter_error(version: str) -> Iterator[None]:
    """Turn an unexpected error while `version` is loaded into an `AdapterError`, so that one faulty version does not
    end the agent. Errors of the server and of the log are raised unchanged: `ServerController.run` handles them."""
    try:
        yield
    except (AdapterError, UpstreamError, msgspec.DecodeError, BrokerError):
        raise
    except OSError as error:  # such as a full disk
        raise AdapterError(f"{type(error).__name__}: {error}", permanent=False) from error
    except Exception as error:
        logger.error("unexpected error while an adapter was loaded", version=version, exc=error)
        message = f"loading failed unexpectedly ({type(error).__name__}); the agent's log has the traceback"
        raise AdapterError(message, permanent=True) from error


@dataclass(eq=False)
class SamplerContext:
    """The objects that all controllers of a process share."""

    config: Config
    broker: Broker
    policies: Policies
    gateways: GatewayRecords
    files: AdapterFiles
    api_key: str = ""
    """API key of the inference servers; empty if they need none."""


class ServerController:
    """Controls one inference server."""

    def __init__(
        self, context: SamplerContext, url: str, advertised: str, delete_unused: Callable[[], Awaitable[None]]
    ) -> None:
        """`url`: the URL by which this process reaches the server; `advertised`: the URL by which gateways do.
        `delete_unused`: deletes the adapters on the disk that are not in `folders` of any controller."""
        self._context, self._config, self._policies = context, context.config, context.policies
        self._server = Upstream(url, api_key=context.api_key)
        self._advertised, self._delete_unused = advertised, delete_unused
        self.name = replica_name(advertised)
        """Name of the server. Gateways use the same name."""
        self._registration = Registration(context.broker, context.config, self.name)
        self._up = False
        """Whether the server answered when it was last asked."""
        self._complete = False
        """Whether the server has loaded all adapters that were wanted when it started. It is not registered before."""
        self.server_start = ""
        """When the server's process started; empty until this agent has reached the server."""
        self._base_logprobs: dict[str, list[dict[str, float]]] = {}
        """Of base versions, after the prompts of the probe. They are asked for once per process of the server."""
        self._checked_at = 0.0
        """Time of the last health check, by `time.monotonic`."""
        self.loaded: dict[str, str] = {}
        """Folders of the loaded adapters, by version."""
        self._folders_to_adopt: set[str] = set()
        """Folders of adapters that the server had loaded when it was reached, until they are adopted or unloaded."""
        self._newest_folder = ""
        """Folder of the adapter that was or is loaded or checked last."""
        self._has_unused = True
        """Whether the disk may have adapters that are no longer loaded."""
        self._loaded_seq = 0
        """Sequence of this agent's last `policy.loaded`."""
        self._unloading: dict[str, int] = {}
        """Loaded versions to which gateways send no further calls, with the sequence of their `policy.unloaded`."""
        self._refused: dict[str, tuple[str, str]] = {}
        """By version that failed a check, the adapter's SHA-256 and the reason."""
        self.wake = anyio.Event()
        """Set to make `run` load and unload versions now."""

    @property
    def folders(self) -> set[str]:
        """Folders of the adapters that the server has loaded or loads now."""
        return {*self.loaded.values(), *self._folders_to_adopt, self._newest_folder}

    async def run(self) -> None:
        """Control the server until cancelled, then remove its record."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._registration.renew)
                await self._control()
        finally:
            with anyio.move_on_after(2, shield=True):
                await self._server.close()
                await self._registration.remove()

    async def _control(self) -> None:
        """Check the server, load what is wanted and register the server, again and again: when `wake` is set, and at
        the intervals of `gateway.replicas`. A server or a log that does not answer is tried again."""
        settings = self._config.gateway.replicas
        while True:
            self.wake = anyio.Event()
            try:
                if not self._up:
                    await self._handshake()
                elif time.monotonic() - self._checked_at >= settings.health_interval_s:
                    await self._check()
                done = await self._load_wanted()
                self._complete = self._complete or done
                if self._complete:
                    await self._registration.set(
                        SamplerRecord(
                            url=self._advertised,
                            models=(*self._policies.models, *self._policies.branches),
                            server_start=self.server_start,
                            refused=self._refusals(),
                        )
                    )
                if done and self._has_unused:
                    self._has_unused = False
                    await self._delete_unused()
                pause_s = settings.health_interval_s if done else _RETRY_S
            except (UpstreamError, msgspec.DecodeError) as error:
                if self._up:
                    logger.warning("inference server can't be reached", replica=self.name, error=str(error))
                self._up = self._complete = False
                await self._registration.remove()
                pause_s = settings.health_retry_s
            except BrokerError as error:
                why = "log unavailable; adapters are loaded when it is back"
                logger.warning(why, replica=self.name, error=str(error))
                pause_s = 1.0
            with anyio.move_on_after(pause_s):
                await self.wake.wait()

    def _refusals(self) -> dict[str, str]:
        """Return the versions that failed a check, with the reason. A version that was published again with another
        adapter since is left out."""
        return {v: why for v, (sha256, why) in self._refused.items() if self._policies.is_published(v, sha256)}

    # -- the server ------------------------------------------------------------------------------------------------

    async def _check(self) -> None:
        """Check that the server is up, was not restarted and has not lost adapters. Raises `UpstreamError`,
        `msgspec.DecodeError`."""
        await server_state.check_health(self._server)
        folders = await server_state.loaded_adapters(self._server)
        self._checked_at = time.monotonic()
        # A restarted server has lost its adapters. If none was loaded, only the metrics, which cost more, show it.
        if not self.loaded or not self._expected_versions() <= folders.keys():
            await self._handshake()

    def _expected_versions(self) -> set[str]:
        """Return the versions that the server should hold: what it has loaded, by this agent and by the log."""
        return {*self.loaded, *self._policies.loaded(self.name, self.server_start)}

    async def _handshake(self) -> None:
        """Bring what this agent knows of the server up to date, at the first contact, after a failure, and while
        adapters are missing or none is loaded: check its health, read whether it was restarted and which adapters it
        has loaded, publish which ones it lost, and adopt those that this agent did not load. Raises `UpstreamError`,
        `msgspec.DecodeError`, `BrokerError`."""
        await server_state.check_health(self._server)
        server_start = await server_state.process_start_time(self._server)
        folders = await server_state.loaded_adapters(self._server)
        if not server_start:  # no metrics: only the loss of its adapters shows a restart
            lost = self.loaded.keys() - folders.keys()
            server_start = self.server_start if self.server_start and not lost else f"{time.time():.3f}"
        if server_start != self.server_start:
            names = [version_name(model, 0) for model in self._policies.models]
            await server_state.check_base_names(self._server, self.name, names)
            if self.server_start:
                logger.warning("inference server restarted", replica=self.name, server_start=server_start)
            self._complete = False
            self._base_logprobs.clear()
            self.loaded.clear()
            self._unloading.clear()
        self._folders_to_adopt = set(folders.values())  # none of them is deleted before it is adopted
        self.server_start, self._checked_at = server_start, time.monotonic()
        for version in self._expected_versions() - folders.keys():
            logger.warning(
                "the inference server lacks an adapter that it had loaded", replica=self.name, version=version
            )
            # Until the log says so, gateways send the server no calls. The log may have lost its end, and with it that
            # the adapter was unloaded.
            await self._publish_unloaded(version)
            self.loaded.pop(version, None)
            self._unloading.pop(version, None)
        for version, folder in folders.items():
            if version not in self.loaded:
                await self._adopt(version, folder)
        self._folders_to_adopt.clear()
        self._up = True

    async def _adopt(self, version: str, folder: str) -> None:
        """Register an adapter that the server had loaded before this agent started. Unload it if it is not the
        published one. An adapter that is no version of a model here is somebody else's: it is left alone."""
        if not is_version(version) or self._policies.state(parse_version(version)[0]) is None:
            return
        checkpoint = self._policies.checkpoint(version)
        if checkpoint is not None and self._context.files.is_published(checkpoint.event, folder):
            # It was probed: its `policy.loaded` is on the log.
            if version in self._policies.loaded(self.name, self.server_start):
                self.loaded[version] = folder
                return
            self._newest_folder = folder
            try:
                with _as_adapter_error(version):
                    await self._verify(checkpoint, folder, now_us())
                return
            except AdapterError as error:
                why = "adapter found in the server failed a check; unloading it"
                logger.warning(why, version=version, error=str(error))
        await adapter_api.unload(self._server, version)

    # -- versions --------------------------------------------------------------------------------------------------

    def wanted_versions(self) -> list[str]:
        """Return the versions that the server should hold, the most important first: those that model names are routed
        to, then those that calls wait for."""
        refused = self._refusals()
        out = self._policies.decided_versions()
        out += [self._policies.newest(model, refused) for model in self._policies.models]
        out += self._context.gateways.wanted_versions()
        loadable = (v for v in out if v not in refused and self._policies.checkpoint(v) is not None)
        return list(dict.fromkeys(loadable))[: self._config.max_loras()]

    async def _load_wanted(self) -> bool:
        """Load the wanted versions that are missing. Return false if some must be tried again soon, such as because a
        call still uses the version that has to go for them."""
        done = True
        for version in self.wanted_versions():
            checkpoint = self._policies.checkpoint(version)
            if checkpoint is None or (version in self.loaded and version not in self._unloading):
                continue
            if version in self._unloading and not await self._unload_released(version):
                done = False
                continue
            if not await self._free_slot():
                return False
            try:
                await self._load(checkpoint)
            except AdapterError as error:
                logger.error("adapter not loaded", version=version, replica=self.name, error=str(error))
                if error.permanent:
                    self._refused[version] = checkpoint.event.adapter_sha256, str(error)
                else:
                    done = False
        return done

    async def _free_slot(self) -> bool:
        """Make room for one more adapter: while the server holds `vllm.max_loras` adapters, unload the oldest version
        that no call uses and no model name resolves to. Return false if there is no such version yet."""
        for version in list(self._unloading):
            await self._unload_released(version)
        wanted, gateways = self.wanted_versions(), self._context.gateways
        while len(self.loaded) >= self._config.max_loras():
            if not self._unloading:
                # Names may resolve to versions that were loaded since the records were written.
                if not gateways.have_applied(max(self._loaded_seq, self._policies.loads_seq)):
                    return False
                keep = {*wanted, *gateways.served_versions()}
                unused = [v for v in self.loaded if v not in keep and not gateways.in_use(self.name, v)]
                if not unused:
                    return False
                oldest = min(unused, key=lambda v: parse_version(v)[1])
                self._unloading[oldest] = await self._publish_unloaded(oldest)
            for version in list(self._unloading):
                if not await self._unload_released(version):
                    return False
        return True

    async def _publish_unloaded(self, version: str) -> int:
        """Publish `policy.unloaded`, which tells gateways to send no further calls for the version to this server.
        Return its sequence."""
        # Retention reads this event too: it deletes no adapter from the object store while a server holds it.
        event = PolicyUnloaded(
            project=self._config.project,
            model=parse_version(version)[0],
            version=version,
            replica=self.name,
            server_start=self.server_start,
        )
        return (await self._context.broker.publish(event)).seq

    async def _unload_released(self, version: str) -> bool:
        """Unload a version if no call uses it. Return false if a call does, or if a gateway has not yet applied
        `policy.unloaded`."""
        if not self._context.gateways.is_released(self.name, version, self._unloading[version]):
            return False
        await adapter_api.unload(self._server, version)
        del self.loaded[version], self._unloading[version]
        logger.info("adapter unloaded", version=version, replica=self.name)
        return True

    async def _load(self, checkpoint: Checkpoint) -> None:
        """Download an adapter, have the server load it, and publish that. Raises `AdapterError`, and unloads an adapter
        that fails the probe; `UpstreamError`, `BrokerError`."""
        started_at = now_us()
        event, version = checkpoint.event, checkpoint.event.version
        files, self._has_unused = self._context.files, True
        self._newest_folder = str(files.path(version, event.adapter_sha256))
        with _as_adapter_error(version):
            folder = await files.ensure(version, event.adapter, event.adapter_sha256, event.files)
            await adapter_api.load(self._server, version, str(folder))
        try:
            with _as_adapter_error(version):
                await self._verify(checkpoint, str(folder), started_at)
        except AdapterError:
            await adapter_api.unload(self._server, version)
            raise

    async def _verify(self, checkpoint: Checkpoint, folder: str, started_at: int) -> None:
        """Probe a loaded adapter and publish `policy.loaded`. Gateways then send calls for the version to this server.

        Raises `AdapterError`, `UpstreamError`, `BrokerError`."""
        version = checkpoint.event.version
        model, step = parse_version(version)
        base = checkpoint.base
        if base not in self._base_logprobs:
            self._base_logprobs[base] = await adapter_api.next_logprobs(self._server, base)
        adapted = await adapter_api.next_logprobs(self._server, version)
        pairs = zip(self._base_logprobs[base], adapted, strict=True)
        delta = max(adapter_api.logprob_difference(a, b) for a, b in pairs)
        if delta == 0.0:
            message = "the adapter changes nothing: its logprobs equal those of the base model"
            raise AdapterError(message, permanent=True)
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
            server_start=self.server_start,
        )
        crash.point("sampler.adapter_loaded")
        self._loaded_seq = (await self._context.broker.publish(event)).seq
        self.loaded[version] = folder
        logger.info("adapter loaded", version=version, replica=self.name, delta=delta, load_s=event.load_s)
