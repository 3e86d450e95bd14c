"""The owner of the gateway's port: starts the workers, gives them connections, restarts those that end or hang, and
stops them. A worker that gives no sign of life for a few seconds gets no connections until it does again.

It reads no request. All workers together are one service to whoever started the owner: it is ready when every worker
is, and it stops when every worker has finished its calls. If it is killed, the workers end.
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
from rollout_gateway.workers.link import Link, LinkLostError
from rollout_gateway.workers.siblings import OWNER, WAIT_S, WORKERS, WorkerState

log = get_logger("rollout_gateway.workers.owner")

_BACKOFF_FIRST_S, _BACKOFF_MAX_S, _HEALTHY_AFTER_S = 0.25, 30.0, 60.0
_GIVE_UP_AFTER = 5
"""Failed starts in a row after which a worker that never worked ends the gateway."""
_SILENT_S = 3 * BEAT_S
"""Time without a heartbeat after which a worker gets no new connections. It is killed after `supervisor.deadline_s`."""
_STOP_S = 22.0
"""Time that a worker has to stop, beyond `gateway.drain_s`: 20 s for calls that are cut off, as its HTTP server
allows. The supervisor gives the whole gateway 25 s."""


class WorkersError(Exception):
    """A worker does not start."""


@dataclass(eq=False)
class _Worker:
    number: int
    ready: anyio.Event
    ever_ready: bool = False
    restarts: int = 0
    link: Link | None = None
    """Set while the worker is ready and responds."""
    state: WorkerState = "starting"


class Owner:
    """The workers of one gateway."""

    def __init__(self, config: Config, listener: socket.socket, command: Sequence[str]) -> None:
        """`command` starts a gateway with these settings; a worker gets more arguments."""
        self._config, self._command = config, command
        self._distributor = handover.Distributor(listener)
        self._workers = [_Worker(n, anyio.Event()) for n in range(1, config.gateway.workers + 1)]

    async def run(self, ready: Ready, url: str) -> None:
        """Run the workers until cancelled. `ready` is called once all of them are.

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
                    f"gateway: worker {worker.number} can't use the settings; see its message above"
                )
            if failures >= _GIVE_UP_AFTER:
                raise WorkersError(
                    f"worker {worker.number} does not start (exit code {code}); see its log above"
                )
            if time.monotonic() - began > _HEALTHY_AFTER_S:
                backoff.reset()
            await backoff.wait()
            worker.restarts += 1

    async def _run_once(self, worker: _Worker) -> int:
        ours, theirs = handover.pair()
        link_end, their_link_end = socket.socketpair()
        try:
            process, reports = await child.launch(
                [*self._command, "--worker", str(worker.number), str(theirs.fileno()), str(their_link_end.fileno())],
                env=os.environ, handles=(theirs.fileno(), their_link_end.fileno()), own_session=False,
            )  # fmt: skip
        except BaseException:
            ours.close()
            theirs.close()
            link_end.close()
            raise
        finally:
            their_link_end.close()
        lane, link = handover.Lane(ours, theirs), Link(link_end, self._answer)
        try:
            async with anyio.create_task_group() as tg:
                tg.start_soon(link.run)
                tg.start_soon(self._watch, worker, process, reports, lane, link)
                code = await process.wait()
                tg.cancel_scope.cancel()
        finally:
            await self._stop(process)
            worker.link, worker.state = None, "starting"
            self._distributor.remove(lane)
            lane.close()
            os.close(reports)
        return code

    async def _watch(
        self, worker: _Worker, process: anyio.abc.Process, reports: int, lane: handover.Lane, link: Link
    ) -> None:
        """Give the worker connections while it is ready and responds. Kill it if it hangs."""
        if not await child.is_ready(reports):
            return  # it ended
        worker.ever_ready = True
        log.info("worker ready", number=worker.number, pid=process.pid)
        deadline_s = self._config.supervisor.deadline_s
        silent_s = min(_SILENT_S, deadline_s)
        while True:
            worker.link, worker.state = link, "ready"
            self._distributor.add(lane)
            worker.ready.set()
            reason = await liveness.silent(reports, silent_s)
            worker.link, worker.state = None, "silent"
            self._distributor.remove(lane)
            log.warning(
                "worker does not respond; it gets no connections", number=worker.number, reason=reason
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
        """Have a worker finish its calls. It still gets connections, whose calls it refuses with `stopping`."""
        if process.returncode is not None:
            return
        with anyio.CancelScope(shield=True):
            process.terminate()
            with anyio.move_on_after(self._config.gateway.drain_s + _STOP_S):
                await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()

    # -- what the workers ask --------------------------------------------------------------------------------------

    async def _answer(self, kind: str, content: bytes) -> bytes:
        """Ask every worker, and return by their labels the answers of those that respond, and answer within
        `WAIT_S`. The owner itself answers what state the workers are in."""
        if kind == WORKERS:
            return msgspec.msgpack.encode({str(w.number): w.state for w in self._workers})
        answers: dict[str, bytes] = {OWNER: generate_latest(self._registry())} if kind == "metrics" else {}

        async def one(worker: _Worker, link: Link) -> None:
            with anyio.move_on_after(WAIT_S), contextlib.suppress(LinkLostError):  # it may have died just now
                answers[str(worker.number)] = await link.ask(kind, content)

        async with anyio.create_task_group() as tg:
            for worker in self._workers:
                if worker.link is not None:
                    tg.start_soon(one, worker, worker.link)
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
        up = GaugeMetricFamily("journeyman_worker_up", "Whether a worker takes calls.", labels=("worker",))
        restarts = CounterMetricFamily(
            "journeyman_worker_restarts", "How often a worker was started again.", labels=("worker",)
        )
        for worker in self._workers:
            up.add_metric((str(worker.number),), int(worker.link is not None))
            restarts.add_metric((str(worker.number),), worker.restarts)
        return [up, restarts]
