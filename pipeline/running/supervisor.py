"""Starts the processes of an installation, checks them, restarts them with backoff and stops them in order.

Every process has its own session, so Ctrl-C in a terminal reaches the supervisor only. It stops the services first,
waits until the store has written the log's events, and stops the log last. Children end when the supervisor ends,
even if it is killed. `<run_dir>/state.json` holds the state of every process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.abc
import httpx
import msgspec
import nats.errors

from pipeline import streams
from pipeline.concurrency.backoff import Backoff
from pipeline.config import Config, save
from pipeline.log import memory
from pipeline.log.broker import Broker, BrokerError, BrokerUnavailableError
from pipeline.running import child, liveness
from pipeline.running.folder_lock import make_private
from pipeline.running.plan import ProcessSpec
from pipeline.running.ports import http_url
from pipeline.running.state import ProcessState, RunState, process_start, write_state
from pipeline.telemetry import logs

logger = logs.get_logger("pipeline.running.supervisor")

BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.25, 30.0
BACKOFF_RESETS_AFTER_S = 60.0
"""Time that a process ran after which its next backoff begins anew."""
GIVE_UP_AFTER = 5
"""Failed starts in a row after which a process that never worked ends the installation."""
PROBE_EVERY_S = 0.1
"""Time between two checks whether a server that is starting answers, or whether the store has caught up."""
TRIM_EVERY_S = 10.0
"""Time between two checks of the memory of the log's server."""
DRAIN_S = 60.0
"""Longest time that the stop waits for the store to write the log's remaining events."""
STOP_ORDER = ("ui", "gateway", "sampler", "judge", "trainer", "telemetry", "store", "vllm", "nats")


class SupervisorError(Exception):
    """A process does not start. The message names it and holds the last lines of its log."""


@dataclass
class Watched:
    """A process and its state: `waiting` for those that it needs, `starting`, `ready`, `failed` (it hangs and is
    killed), `backoff` (the pause before the next start), `stopping`, `stopped`."""

    spec: ProcessSpec
    ready: anyio.Event
    stopping: anyio.Event
    state: str = "waiting"
    pid: int = 0
    restarts: int = 0
    ever_ready: bool = False
    log_begin: int = 0
    """Size of its log, in bytes, when it was started."""
    errors: tuple[str, ...] = ()
    """The errors in its log since then, when it became ready or ended."""
    process: anyio.abc.Process | None = None


class Supervisor:
    """`run` runs the installation until `stop` or cancellation."""

    def __init__(
        self,
        config: Config,
        specs: list[ProcessSpec],
        on_change: Callable[[Watched], None] | None = None,
        inherit: tuple[int, ...] = (),
    ) -> None:
        """`inherit`: file descriptors that every process gets, such as the lock of the run directory
        (`pipeline.running.folder_lock`)."""
        self.config = config
        self._inherit = inherit
        self.watched = {s.name: Watched(s, anyio.Event(), anyio.Event()) for s in specs}
        self._on_change = on_change
        self._run_dir = Path(config.run_dir)
        self._logs = config.path("logs")
        self._stop_requested = anyio.Event()
        self._log_probe = liveness.LogProbe(config)
        self._probing: anyio.CancelScope | None = None
        self._written: RunState | None = None
        """What `state.json` holds."""

    @property
    def alarms(self) -> tuple[str, ...]:
        """Present alarms about the log."""
        return self._log_probe.alarms

    def stop(self) -> None:
        """Begin an orderly stop. `run` returns when it is complete."""
        self._stop_requested.set()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Start all processes, report `started` when all are ready and the log was checked (`alarms`), and restart them
        until `stop`.

        Cancellation kills them at once. Raises `SupervisorError` (in a group) if a process never becomes ready."""
        make_private(self._run_dir)
        self._logs.mkdir(parents=True, exist_ok=True)
        save(self.config, self.config.path("config.toml"))
        self._write_state()
        async with anyio.create_task_group() as tg:
            for watched in self.watched.values():
                tg.start_soon(self._keep_running, watched)

            async def announce() -> None:
                """Report `started` once all processes are ready and the log was checked."""
                for watched in self.watched.values():
                    await watched.ready.wait()
                if self.config.nats.url:
                    await self._log_probe.checked.wait()
                task_status.started()

            tg.start_soon(announce)
            tg.start_soon(self._rewrite_state)
            if self.config.nats.url:
                tg.start_soon(self._watch_log)
            await self._stop_requested.wait()
            await self._stop_all()
            tg.cancel_scope.cancel()

    # -- one process ---------------------------------------------------------------------------------------------

    async def _keep_running(self, watched: Watched) -> None:
        """Start a process, and start it again after a growing pause whenever it ends, until it is to stop.

        Raises `SupervisorError` if it was never ready: after `GIVE_UP_AFTER` starts, or after one that ends with 2, the
        status for settings that can't be used. A process that was ready once is always restarted."""
        backoff, failures = Backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S), 0
        for name in watched.spec.needs:
            await self.watched[name].ready.wait()
        while not watched.stopping.is_set():
            began = time.monotonic()
            try:
                code = await self._run_once(watched)
            except OSError as error:  # such as a full disk, or no file with a secret: a start that fails
                logger.error("process not started", process=watched.spec.name, error=str(error))
                code = 1
            if watched.stopping.is_set():
                return
            logger.warning("process died", process=watched.spec.name, code=code, restarts=watched.restarts)
            failures = 0 if watched.ever_ready else failures + 1
            if failures >= GIVE_UP_AFTER or (code == 2 and not watched.ever_ready):
                raise SupervisorError(self._why_it_does_not_start(watched, code))
            if time.monotonic() - began > BACKOFF_RESETS_AFTER_S:
                backoff.reset()
            self._set_state(watched, "backoff")
            await backoff.wait()
            watched.restarts += 1

    async def _run_once(self, watched: Watched) -> int:
        """Start a process, kill it if it hangs, and return its exit status when it has ended. Processes that it started
        are killed too."""
        spec = watched.spec
        if spec.prepare is not None:
            spec.prepare()
        # The fault handler is there before the imports, which may hang too (`_await_start`).
        env = spec.environment(self.config) | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        with (self._logs / f"{spec.name}.log").open("ab") as log:
            watched.log_begin = log.tell()
            process, read_end = await child.launch(
                spec.argv, env=env, output=log, inherited_fds=self._inherit, is_service=not spec.probe
            )
        watched.process, watched.pid = process, process.pid
        try:
            if watched.stopping.is_set():
                return -signal.SIGKILL  # `_stop` was called during the launch and could not wait; `finally` kills it
            self._set_state(watched, "starting")
            async with anyio.create_task_group() as tg:
                tg.start_soon(self._watch, watched, read_end)
                code = await process.wait()
                tg.cancel_scope.cancel()
        finally:
            os.close(read_end)
            _kill_group(process.pid)  # what the process left behind, such as vLLM's engine
            if process.returncode is None:
                with anyio.CancelScope(shield=True):
                    await process.wait()
            watched.process = None
        return code

    # -- liveness (`pipeline.running.liveness`) ---------------------------------------------------------------------

    async def _watch(self, watched: Watched, fd: int) -> None:
        """Kill a process that does not become ready, or does not respond afterwards. `fd`: the pipe on which a service
        reports."""
        await self._await_start(watched, fd)
        probe = watched.spec.probe
        if probe.startswith("tcp://"):
            return  # the log: `_watch_log` writes to it
        if probe:
            await self._kill_hanging(watched, await liveness.until_unhealthy(probe, self.config.supervisor))
        else:
            await self._kill_hanging(watched, await liveness.until_silent(fd, self.config.supervisor.deadline_s))

    async def _watch_log(self) -> None:
        """Check by writes that the log's server works, until cancelled. Restart it when it accepts none, if the
        supervisor started it; in any case keep `alarms` up to date."""
        watched = self.watched.get("nats")
        if watched is not None:
            await watched.ready.wait()

        async def restart_server(reason: str) -> None:
            if watched is not None and watched.state == "ready":
                await self._kill_hanging(watched, reason)

        async with anyio.create_task_group() as tg:
            self._probing = tg.cancel_scope
            if self.config.nats.max_memory:
                tg.start_soon(self._bound_memory)
            await self._log_probe.watch(restart_server)

    async def _bound_memory(self) -> None:
        """Delete the oldest events while the log's server needs more memory than `nats.max_memory`."""
        while True:
            try:
                async with Broker.connect(self.config.nats, name="memory", provision=False) as broker:
                    while True:
                        await memory.trim(broker, self.config.nats.max_memory)
                        await anyio.sleep(TRIM_EVERY_S)
            except (BrokerError, nats.errors.Error) as error:
                logger.warning("the log's memory was not checked; trying again", exc=error)
            await anyio.sleep(TRIM_EVERY_S)

    async def _kill_hanging(self, watched: Watched, reason: str) -> None:
        """Kill a process that hangs and log the `reason`; `_keep_running` starts it again."""
        process = watched.process
        if process is None or watched.stopping.is_set():
            return
        logger.error("process does not respond; killing it", process=watched.spec.name, reason=reason)
        self._set_state(watched, "failed")
        if watched.spec.name != "nats":  # a Python process writes the stacks of its threads to its log
            await child.abort(process)
        _kill_group(process.pid)

    async def _await_start(self, watched: Watched, fd: int) -> None:
        """Wait until the process is ready or has ended. Kill it if it is not ready after `start_timeout_s`. `fd`: the
        pipe on which a service reports."""
        spec = watched.spec
        with anyio.move_on_after(spec.start_timeout_s) as bound:
            if spec.probe:
                await _until_it_answers(spec.probe)
                if spec.name == "nats":
                    await self._provision(watched.ever_ready)
            elif not await child.wait_until_ready(fd):
                return  # the process ended
            watched.ever_ready = True
            self._set_state(watched, "ready")
            watched.ready.set()
        if bound.cancelled_caught:
            await self._kill_hanging(watched, f"it was not ready after {spec.start_timeout_s:g} s")

    async def _provision(self, was_provisioned: bool) -> None:
        """Create streams, consumers and buckets, as the operator: the services' NATS users may not. Retries until the
        log answers. Raises `BrokerError` if it refuses them, unless it accepted them before (`was_provisioned`)."""
        settings, backoff = msgspec.structs.replace(self.config.nats, provision=True), Backoff()
        while True:
            try:
                async with Broker.connect(settings, name="supervisor") as broker:
                    await broker.provision_consumer(streams.trainer_consumer(self.config.trainer.branch))
                    return
            except BrokerError as error:
                # A server that accepted the same settings before refuses them while its disk is full.
                if not isinstance(error, BrokerUnavailableError) and not was_provisioned:
                    raise
                logger.warning("the log is not provisioned yet; trying again", exc=error)
            await backoff.wait()

    def _why_it_does_not_start(self, watched: Watched, code: int) -> str:
        """Return the message of the error that a process does not start: its exit status and the end of its log."""
        path = self._logs / f"{watched.spec.name}.log"
        tail = path.read_text("utf-8", "replace").splitlines()[-15:] if path.exists() else []
        return f"{watched.spec.name} does not start (exit code {code}); {path} ends:\n" + "\n".join(tail)

    # -- stopping ------------------------------------------------------------------------------------------------

    async def _stop_all(self) -> None:
        """Stop services, then the store, then the log, so that events in flight are stored."""
        if self._probing is not None:
            self._probing.cancel()
        for name in STOP_ORDER:
            if name in self.watched:
                if name == "store":
                    await self._drain_store()
                await self._stop(self.watched[name])

    async def _stop(self, watched: Watched) -> None:
        """Stop a process for good: by SIGTERM, and after `stop_grace_s` by SIGKILL."""
        watched.stopping.set()
        self._set_state(watched, "stopping")
        process = watched.process
        if process is not None and process.returncode is None:
            process.terminate()
            with anyio.move_on_after(watched.spec.stop_grace_s):
                await process.wait()
            _kill_group(process.pid)
            await process.wait()
        self._set_state(watched, "stopped")

    async def _drain_store(self) -> None:
        """Wait until the store has written every event of the log, or the wait times out."""
        if self.watched["store"].state != "ready":
            return
        try:
            with anyio.move_on_after(DRAIN_S) as bound:
                async with Broker.connect(self.config.nats, name="supervisor", provision=False) as broker:
                    while await broker.lag("store-"):  # noqa: ASYNC110 - the server can only be asked
                        await anyio.sleep(PROBE_EVERY_S)
            if bound.cancelled_caught:
                logger.warning("the store is still behind; it continues at the next start")
        except BrokerError as error:
            logger.warning("the log does not answer; the store stops without the remaining events", exc=error)

    # -- state ---------------------------------------------------------------------------------------------------

    def _set_state(self, watched: Watched, state: str) -> None:
        """Give a process a new state, write it to `state.json` and call `on_change`. For `ready` and `backoff`, set
        `errors` to the errors that it logged since its start; if there are none, for `backoff` to its last line."""
        watched.state = state
        watched.errors = ()
        if state in ("ready", "backoff"):
            file = self._logs / f"{watched.spec.name}.log"
            watched.errors = logs.error_lines(file, watched.log_begin)
            if state == "backoff" and not watched.errors and (line := logs.last_plain_line(file, watched.log_begin)):
                watched.errors = (line,)
        logger.info("process", process=watched.spec.name, state=state, pid=watched.pid)
        self._write_state()
        if self._on_change is not None:
            self._on_change(watched)

    def _write_state(self) -> None:
        """Write the state of all processes to `state.json`, which commands and the dashboard read."""
        config = self.config
        urls: dict[str, str | tuple[str, ...]] = {
            "gateway": http_url(config.gateway.host, config.gateway.port),
            "nats": config.nats.address,
            "vllm": config.vllm.urls,
        }
        if "ui" in self.watched:
            urls["ui"] = http_url(config.ui.host, config.ui.port)
        processes = {
            name: ProcessState(pid=w.pid, since=process_start(w.pid), state=w.state, restarts=w.restarts)
            for name, w in self.watched.items()
        }
        state = RunState(
            pid=os.getpid(),
            since=process_start(os.getpid()),
            ready=all(w.state == "ready" for w in self.watched.values()),
            project=config.project,
            urls=urls,
            alarms=self.alarms,
            services=processes,
        )
        if state == self._written:  # `find_installation` takes the file's time for that of the last change
            return
        try:
            write_state(self._run_dir, state)
            self._written = state
        except OSError as error:
            self._written = None
            logger.error("state.json was not written; it is tried again", error=str(error))

    async def _rewrite_state(self) -> None:
        """Write `state.json` again at intervals, until cancelled: alarms may have changed, or a write have failed."""
        while True:
            await anyio.sleep(self.config.supervisor.probe_every_s)
            self._write_state()


async def _until_it_answers(probe: str) -> None:
    """Return when a server answers at `probe`, a `tcp://` or `http://` address."""
    if probe.startswith("tcp://"):
        host, _, port = probe.removeprefix("tcp://").rpartition(":")
        while True:
            try:
                async with await anyio.connect_tcp(host, int(port)):
                    return
            except OSError:
                await anyio.sleep(PROBE_EVERY_S)
    async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
        while True:
            try:
                if (await client.get(probe)).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await anyio.sleep(PROBE_EVERY_S)


def _kill_group(pid: int) -> None:
    """Kill the process group that the process `pid` leads: itself and what it started. Does nothing if it is gone."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
