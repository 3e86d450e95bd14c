"""From a published checkpoint to an adapter that a replica provably serves.

Each replica has a keeper: it finds out whether the server is up and which life of it this is, loads what must be
loaded (download, sha256, unpack, load, probe, `policy.loaded`), and only then lets the replica take calls. An adapter is
loaded once under its versioned name and never in place; its folder's name holds the digest, so a gateway that restarts
recognises what the server already holds.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import shutil
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import msgspec

from pipeline import crash
from pipeline.config import Config
from pipeline.events import PolicyLoaded, PolicyUnloaded, now_us
from pipeline.log.broker import Broker, BrokerError, HistoryGoneError
from pipeline.names import InvalidNameError, parse_version, subject_token, version_name
from pipeline.streams import ADAPTERS_BUCKET
from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.upstream import UpstreamError
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.replicas import Fleet, Loaded, Replica

log = get_logger("rollout_gateway.serving.adapters")

PROBE_PROMPTS = tuple(tuple(range(first, first + 16)) for first in (3, 35, 67, 99))
"""Token ids of the probe's prompts: small ones, which any vocabulary has."""
PROBE_TOP = 20
"""Logprobs compared after each prompt: as many as vLLM gives by default. Those of the next token, since asking for a
prompt's own logprobs brings vLLM 0.32 down when calls to other adapters are in the batch."""


class AdapterError(Exception):
    """An adapter that must not serve. `lasting`: trying again can't help."""

    def __init__(self, message: str, *, lasting: bool) -> None:
        super().__init__(message)
        self.lasting = lasting


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _ProbeLogprobs(msgspec.Struct):
    top_logprobs: list[dict[str, float]]


class _ProbeChoice(msgspec.Struct):
    index: int
    logprobs: _ProbeLogprobs


class _ProbeReply(msgspec.Struct):
    choices: list[_ProbeChoice]


class AdapterFiles:
    """Adapters on this machine's disk, where the inference server reads them."""

    def __init__(self, folder: Path, broker: Broker) -> None:
        self.folder, self._broker = folder.resolve(), broker
        self._locks: dict[str, asyncio.Lock] = {}

    def path(self, version: str, sha256: str) -> Path:
        return self.folder / f"{subject_token(version).replace('/', '%2F')}-{sha256[:16]}"

    async def ensure(
        self, version: str, name: str, sha256: str, files: Mapping[str, str] | None = None
    ) -> Path:
        """The unpacked adapter's folder, downloading it where it is not there. `files`: the SHA-256 of each file in it; a
        folder from before is unpacked again where one differs.

        Raises `AdapterError` where its bytes are not those that were published."""
        path = self.path(version, sha256)
        async with self._locks.setdefault(version, asyncio.Lock()):
            if path.is_dir():
                if await anyio.to_thread.run_sync(_unchanged, path, files or {}):
                    return path
                log.error("the adapter's folder was changed; unpacking it again", version=version)
                await anyio.to_thread.run_sync(shutil.rmtree, path)
            try:
                data = await self._broker.get_object(ADAPTERS_BUCKET, name)
            except HistoryGoneError as error:
                raise AdapterError(str(error), lasting=True) from error
            digest = hashlib.sha256(data).hexdigest()
            if digest != sha256:
                raise AdapterError(f"{name} has sha256 {digest}, the checkpoint says {sha256}", lasting=True)
            await anyio.to_thread.run_sync(_unpack, data, path)
            return path

    def delete(self, path: str) -> None:
        """Remove an adapter that no replica holds any more."""
        folder = Path(path)
        if folder.parent == self.folder:
            shutil.rmtree(folder, ignore_errors=True)


def _unchanged(folder: Path, files: Mapping[str, str]) -> bool:
    """Whether every file of an unpacked adapter is the one that was published."""
    if not files:  # from before checkpoints named their files
        return True
    held = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}
    # What else the event names is the training state, which is not in the archive.
    return held == {n: digest for n, digest in files.items() if n.startswith("adapter_")}


def _unpack(data: bytes, path: Path) -> None:
    temporary = path.with_name(path.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(temporary, filter="data")
    for file in temporary.rglob("*"):  # the archive's own modes are for everyone
        file.chmod(0o700 if file.is_dir() else 0o600)
    crash.point("gateway.before_rename")
    temporary.rename(path)
    crash.point("gateway.after_rename")


class AdapterManager:
    """The keepers of all replicas."""

    def __init__(
        self, config: Config, broker: Broker, policies: Policies, fleet: Fleet, gateway: str
    ) -> None:
        self._config, self._broker, self._policies, self._fleet = config, broker, policies, fleet
        self._gateway = gateway
        self._files = AdapterFiles(config.path("adapters"), broker)
        self._unloaded: list[str] = []
        self._base_probes: dict[tuple[str, str], list[dict[str, float]]] = {}
        self.on_loaded: list[Callable[[PolicyLoaded], None]] = []

    async def run(self) -> None:
        """Keep every replica, for ever."""
        async with anyio.create_task_group() as tg:
            for replica in self._fleet.replicas:
                tg.start_soon(self._keep, replica)

    # -- one replica ---------------------------------------------------------------------------------------------

    async def _keep(self, replica: Replica) -> None:
        gateway = self._config.gateway
        while True:
            replica.work.clear()
            try:
                if not replica.up:
                    await self._meet(replica)
                pause = gateway.replicas.health_interval_s
                loaded = await self._load_wanted(replica)
                if not loaded:
                    pause = 0.5
                if loaded and not replica.ready:
                    replica.ready = True
                    log.info("replica ready", replica=replica.name, incarnation=replica.incarnation)
                self._fleet.changed()
            except (UpstreamError, msgspec.DecodeError) as error:
                if replica.ready or replica.up:
                    log.warning("replica lost", replica=replica.name, error=str(error))
                replica.up = replica.ready = replica.doubted = False
                self._fleet.changed()
                pause = gateway.replicas.health_retry_s
            except BrokerError as error:
                log.warning("adapters wait for the log", replica=replica.name, error=str(error))
                pause = 1.0
            with anyio.move_on_after(pause):
                await replica.work.wait()
            if replica.up:
                await self._check_health(replica)

    async def _check_health(self, replica: Replica) -> None:
        try:
            status, _ = await replica.upstream.fetch("GET", "/health", timeout_s=10)
        except UpstreamError as error:
            log.warning("replica lost", replica=replica.name, error=str(error))
            status = 0
        if status != 200:
            replica.up = replica.ready = False

    async def _meet(self, replica: Replica) -> None:
        """Find out whether the server is up, which life of it this is and what it holds."""
        status, _ = await replica.upstream.fetch("GET", "/health", timeout_s=10)
        if status != 200:
            raise UpstreamError(f"health check answered {status}", answered=True)
        incarnation = await _incarnation(replica)
        status, body = await replica.upstream.fetch("GET", "/v1/models")
        if status != 200:
            raise UpstreamError(f"listing models answered {status}", answered=True)
        cards = msgspec.json.decode(body, type=_Cards).data
        held = {c.id: c.root or "" for c in cards if c.parent is not None}
        if incarnation != replica.incarnation:
            replica.loaded.clear()
            replica.draining.clear()
        replica.incarnation = incarnation
        for version in [v for v in replica.loaded if v not in held]:
            del replica.loaded[version]
        for version, root in held.items():
            if version not in replica.loaded:
                await self._adopt(replica, version, root)
        replica.up, replica.doubted = True, False

    async def _adopt(self, replica: Replica, version: str, root: str) -> None:
        """Take over what a server holds that this gateway did not load, if it is what was published."""
        try:
            model, _ = parse_version(version)
        except InvalidNameError:
            return
        if model not in self._policies.models:
            return
        if self._policies.knows(version):
            event = self._policies.checkpoint(version).event
            if Path(root).name == self._files.path(version, event.adapter_sha256).name:
                try:
                    await self._prove(replica, version, root, now_us())
                except AdapterError as error:
                    log.warning("adapter not taken over", version=version, error=str(error))
                else:
                    return
        await self._unload_now(replica, version)

    async def _load_wanted(self, replica: Replica) -> bool:
        """Load what is wanted and missing; false where something must be tried again soon."""
        done = await self._drop_replaced(replica)
        for version in self.wanted():
            if replica.holds(version) or version in self._policies.refused:
                continue
            if not await self._make_room(replica, version):
                done = False
                break
            try:
                await self._load(replica, version)
            except AdapterError as error:
                log.error("adapter refused", version=version, replica=replica.name, error=str(error))
                if error.lasting:
                    self._policies.refused[version] = str(error)
                else:
                    done = False
            self._fleet.changed()
        return done

    async def _drop_replaced(self, replica: Replica) -> bool:
        """Unload versions whose checkpoint was published anew with another adapter, as after a power cut that took both the
        log's end and the trainer's disk. False while calls still run on one; no new call goes to it."""
        done = True
        for version, held in list(replica.loaded.items()):
            if not self._policies.knows(version):
                continue
            event = self._policies.checkpoint(version).event
            if Path(held.path).name == self._files.path(version, event.adapter_sha256).name:
                continue
            replica.draining.add(version)
            if replica.in_flight[version]:
                done = False
            else:
                await self.unload(replica, version)
        return done

    def wanted(self) -> list[str]:
        """Versions to hold, most wanted first: what names stand for, then exact ones that requests asked for."""
        out: list[str] = []
        for model in self._policies.models.values():
            if model.promoted is not None:
                out += [model.promoted.version, *([model.promoted.other] if model.promoted.other else [])]
            out.append(self._policies.newest(model.name))
        demanded = self._fleet.demanded
        out += sorted(demanded, key=lambda v: -demanded[v])
        limit = self._config.vllm.max_loras
        return [v for v in dict.fromkeys(out) if not v.endswith("@0") and self._policies.knows(v)][:limit]

    async def _make_room(self, replica: Replica, version: str) -> bool:
        """Unload the version that was unused longest, if there is need; false where all are in use."""
        wanted = self.wanted()
        while len(replica.loaded) >= self._config.vllm.max_loras:
            idle = [v for v in replica.loaded if not replica.in_flight[v] and v not in wanted]
            if not idle:
                self._fleet.waiting_for_room = True
                return False
            await self.unload(replica, min(idle, key=lambda v: replica.loaded[v].last_used))
        self._fleet.waiting_for_room = False
        return True

    async def unload(self, replica: Replica, version: str) -> None:
        """Drop an idle version; its files go once a later one is dropped too."""
        path = replica.loaded[version].path
        replica.draining.add(version)
        self._fleet.demanded.pop(version, None)
        await self._unload_now(replica, version)
        del replica.loaded[version]
        replica.draining.discard(version)
        log.info("adapter unloaded", version=version, replica=replica.name)
        self._unloaded.append(path)
        if len(self._unloaded) > 1:
            old = self._unloaded.pop(0)
            if not any(old == a.path for r in self._fleet.replicas for a in r.loaded.values()):
                await anyio.to_thread.run_sync(self._files.delete, old)
        # For retention: an adapter that a replica holds stays in the object store.
        await self._broker.publish(
            PolicyUnloaded(
                project=self._config.project, model=parse_version(version)[0], version=version,
                replica=replica.name, incarnation=replica.incarnation,
            )
        )  # fmt: skip

    async def _unload_now(self, replica: Replica, version: str) -> None:
        status, body = await replica.upstream.fetch(
            "POST", "/v1/unload_lora_adapter", msgspec.json.encode({"lora_name": version}), timeout_s=60
        )
        if status not in (200, 404):
            log.warning(
                "unloading", version=version, replica=replica.name, status=status, answer=body[:300].decode()
            )

    async def _load(self, replica: Replica, version: str) -> None:
        started = now_us()
        event = self._policies.checkpoint(version).event
        path = await self._files.ensure(version, event.adapter, event.adapter_sha256, event.files)
        status, body = await replica.upstream.fetch(
            "POST",
            "/v1/load_lora_adapter",
            msgspec.json.encode({"lora_name": version, "lora_path": str(path)}),
            timeout_s=120,
        )
        if status != 200 and b"already been loaded" not in body:
            lasting = 400 <= status < 500
            raise AdapterError(f"the server answered {status}: {body[:300].decode()}", lasting=lasting)
        try:
            await self._prove(replica, version, str(path), started)
        except AdapterError:
            await self._unload_now(replica, version)
            raise

    # -- proof ---------------------------------------------------------------------------------------------------

    async def _prove(self, replica: Replica, version: str, path: str, started: int) -> None:
        """Probe, publish `policy.loaded`, then let the version be routed to."""
        checkpoint = self._policies.checkpoint(version)
        model, step = parse_version(version)
        delta = await self._probe(replica, model, version)
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
            load_s=(now_us() - started) / 1e6,
            started_at=started,
            incarnation=replica.incarnation,
        )
        headers = {"traceparent": checkpoint.traceparent} if checkpoint.traceparent else {}
        crash.point("gateway.adapter_loaded")
        await self._broker.publish(event, headers)
        replica.loaded[version] = Loaded(path, delta, time.monotonic())
        log.info("adapter loaded", version=version, replica=replica.name, delta=delta, load_s=event.load_s)
        for callback in self.on_loaded:
            callback(event)

    async def _probe(self, replica: Replica, model: str, version: str) -> float:
        """Largest difference of the logprobs after fixed prompts between the version and its base."""
        key = (replica.name + replica.incarnation, model)
        if key not in self._base_probes:
            self._base_probes[key] = await _next_logprobs(replica, version_name(model, 0))
        here = await _next_logprobs(replica, version)
        return max(_difference(a, b) for a, b in zip(self._base_probes[key], here, strict=True))


def _difference(a: dict[str, float], b: dict[str, float]) -> float:
    """Over the tokens that both name; where they share none, of the likeliest ones, whichever these are."""
    shared = a.keys() & b.keys()
    if shared:
        return max(abs(a[token] - b[token]) for token in shared)
    return abs(max(a.values()) - max(b.values())) or 1.0


async def _next_logprobs(replica: Replica, served: str) -> list[dict[str, float]]:
    """For each probe prompt the likeliest next tokens and their logprobs."""
    request = {
        "model": served,
        "prompt": PROBE_PROMPTS,
        "max_tokens": 1,
        "temperature": 1,
        "logprobs": PROBE_TOP,
        "return_tokens_as_token_ids": True,
    }
    status, body = await replica.upstream.fetch(
        "POST", "/v1/completions", msgspec.json.encode(request), timeout_s=120
    )
    if status != 200:
        raise AdapterError(f"the probe answered {status}: {body[:300].decode()}", lasting=False)
    choices = sorted(msgspec.json.decode(body, type=_ProbeReply).choices, key=lambda c: c.index)
    return [c.logprobs.top_logprobs[0] for c in choices]


async def _incarnation(replica: Replica) -> str:
    """The server process's start time, from its metrics; where it has none, the present."""
    status, body = await replica.upstream.fetch("GET", "/metrics")
    if status == 200:
        for line in body.splitlines():
            if line.startswith(b"process_start_time_seconds"):
                return line.split()[-1].decode()
    return f"{time.time():.3f}"
