"""The owner of the gateway's port: a process that starts the workers, gives them client connections, restarts workers
that end or hang, and stops them. A worker without a heartbeat for a few seconds gets no connections until it sends one.

The owner reads no request. To the supervisor, owner and workers are one service: it is ready when every worker is
ready, and it has stopped when every worker has finished its calls. If the owner is killed, the workers end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import anyio.abc
import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.backoff import Backoff
from pipeline.config import Config, ConfigError
from pipeline.running import child, liveness
from pipeline.running.service import BEAT_S, Ready
from pipeline.telemetry.logs import get_logger
from rollout_gateway.workers import handover
from rollout_gateway.workers.group import OWNER, WAIT_S, WORKERS, WorkerState
from rollout_gateway.workers.rpc import RpcClosedError, RpcConnection

log = get_logger("rollout_gateway.workers.owner")

_BACKOFF_FIRST_S, _BACKOFF_MAX_S, _HEALTHY_AFTER_S = 0.25, 30.0, 60.0
_GIVE_UP_AFTER = 5
"""If a worker was never ready and this many starts in a row failed, the gateway ends."""
_SILENT_S = 3 * BEAT_S
"""Time without a heartbeat after which a worker gets no new connections. It is killed after `supervisor.deadline_s`."""
_STOP_S = 22.0
"""Time in which a worker must stop after `gateway.drain_s`. Its HTTP server needs up to 20 s of it to end the calls
that are still open. The supervisor waits 25 s for the whole gateway."""


class WorkersError(Exception):
    """A worker did not start."""


@dataclass(eq=False)
class _Worker:
    number: int
    ready: anyio.Event
    ever_ready: bool = False
    restarts: int = 0
    rpc: RpcConnection | None = None
    """Set while the worker is ready and responds."""
    state: WorkerState = "starting"


class Owner:
    """The workers of one gateway."""

    def __init__(self, config: Config, listener: socket.socket, command: Sequence[str]) -> None:
        """`listener`: the socket of the port. `command` starts a gateway with these settings; for a worker, arguments
        are added to it."""
        self._config, self._command = config, command
        self._distributor = handover.Distributor(listener)
        self._workers = [_Worker(n, anyio.Event()) for n in range(1, config.gateway.workers + 1)]

    async def run(self, ready: Ready, url: str) -> None:
        """Run the workers until cancelled. `ready` is called once all of them are ready.

        Raises `ConfigError` if a worker can't use the settings, `WorkersError` if one does not start."""
        self._distributor.start()
        try:
            async with anyio.create_task_group() as tg:
                for worker in self._workers:
                    tg.start_soon(self._keep, worker)
                for worker in self._workers:
                    await worker.ready.wait()
                ready(url=url)
        finally:
            self._distributor.close()

    # -- one worker ------------------------------------------------------------------------------------------------

    async def _keep(self, worker: _Worker) -> None:
        backoff, failures = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S), 0
        while True:
            began = time.monotonic()
            code = await self._run_once(worker)
            log.warning("worker died", number=worker.number, code=code, restarts=worker.restarts)
            failures = 0 if worker.ever_ready else failures + 1
            if code == 2 and not worker.ever_ready:
                raise ConfigError(
                    f"gateway: worker {worker.number} can't use the settings; its message above says why"
                )
            if failures >= _GIVE_UP_AFTER:
                raise WorkersError(
                    f"worker {worker.number} did not start (exit code {code}); its log above says why"
                )
            if time.monotonic() - began > _HEALTHY_AFTER_S:
                backoff.reset()
            await backoff.wait()
            worker.restarts += 1

    async def _run_once(self, worker: _Worker) -> int:
        ours, theirs = handover.pair()
        rpc_end, their_rpc_end = socket.socketpair()
        try:
            process, reports = await child.launch(
                [*self._command, "--worker", str(worker.number), str(theirs.fileno()), str(their_rpc_end.fileno())],
                env=os.environ, handles=(theirs.fileno(), their_rpc_end.fileno()), own_session=False,
            )  # fmt: skip
        except BaseException:
            ours.close()
            theirs.close()
            rpc_end.close()
            raise
        finally:
            their_rpc_end.close()
        channel, rpc = handover.WorkerChannel(ours, theirs), RpcConnection(rpc_end, self._call_workers)
        try:
            async with anyio.create_task_group() as tg:
                tg.start_soon(rpc.run)
                tg.start_soon(self._watch, worker, process, reports, channel, rpc)
                code = await process.wait()
                tg.cancel_scope.cancel()
        finally:
            await self._stop(process)
            worker.rpc, worker.state = None, "starting"
            self._distributor.remove(channel)
            channel.close()
            os.close(reports)
        return code

    async def _watch(
        self,
        worker: _Worker,
        process: anyio.abc.Process,
        reports: int,
        channel: handover.WorkerChannel,
        rpc: RpcConnection,
    ) -> None:
        """Give the worker connections while it is ready and sends heartbeats. Kill it if it hangs."""
        if not await child.is_ready(reports):
            return  # it ended
        worker.ever_ready = True
        log.info("worker ready", number=worker.number, pid=process.pid)
        deadline_s = self._config.supervisor.deadline_s
        silent_s = min(_SILENT_S, deadline_s)
        while True:
            worker.rpc, worker.state = rpc, "ready"
            self._distributor.add(channel)
            worker.ready.set()
            reason = await liveness.silent(reports, silent_s)
            worker.rpc, worker.state = None, "silent"
            self._distributor.remove(channel)
            log.warning(
                "worker does not respond; it gets no connections until it does",
                number=worker.number,
                reason=reason,
            )
            with anyio.move_on_after(deadline_s - silent_s) as rest:
                await anyio.wait_readable(reports)
            if rest.cancelled_caught:
                break
            log.info("worker responds again", number=worker.number)
        log.error("worker does not respond; killing it", number=worker.number, deadline_s=deadline_s)
        await child.abort(process)
        process.kill()

    async def _stop(self, process: anyio.abc.Process) -> None:
        """Stop a worker after its calls have ended. It still gets connections; it refuses calls on them with the error
        `stopping`."""
        if process.returncode is not None:
            return
        with anyio.CancelScope(shield=True):
            process.terminate()
            with anyio.move_on_after(self._config.gateway.drain_s + _STOP_S):
                await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()

    # -- calls from the workers ------------------------------------------------------------------------------------

    async def _call_workers(self, method: str, content: bytes) -> bytes:
        """Answer a call from a worker. For `WORKERS`, return the state of each worker. Otherwise call every worker that
        responds, and return the replies by label; those that take longer than `WAIT_S` are left out."""
        if method == WORKERS:
            return msgspec.msgpack.encode({str(w.number): w.state for w in self._workers})
        answers: dict[str, bytes] = {OWNER: generate_latest(self._registry())} if method == "metrics" else {}

        async def one(worker: _Worker, rpc: RpcConnection) -> None:
            with (
                anyio.move_on_after(WAIT_S),
                contextlib.suppress(RpcClosedError),
            ):  # it may have died just now
                answers[str(worker.number)] = await rpc.call(method, content)

        async with anyio.create_task_group() as tg:
            for worker in self._workers:
                if worker.rpc is not None:
                    tg.start_soon(one, worker, worker.rpc)
        return msgspec.msgpack.encode(answers)

    # -- metrics ---------------------------------------------------------------------------------------------------

    def _registry(self) -> CollectorRegistry:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_OwnMetrics(self._workers))
        return registry


class _OwnMetrics(Collector):
    def __init__(self, workers: Sequence[_Worker]) -> None:
        self._workers = workers

    def collect(self) -> list[Metric]:
        up = GaugeMetricFamily("journeywork_worker_up", "1 if the worker takes calls.", labels=("worker",))
        restarts = CounterMetricFamily(
            "journeywork_worker_restarts", "Number of times that a worker was restarted.", labels=("worker",)
        )
        for worker in self._workers:
            up.add_metric((str(worker.number),), int(worker.rpc is not None))
            restarts.add_metric((str(worker.number),), worker.restarts)
        return [up, restarts]
