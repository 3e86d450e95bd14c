"""Finds requests that crash their inference server, and refuses them.

When a server crashes, every call in flight on it fails, and the gateway sends each of them again to another server. If
one of these calls caused the crash, it crashes that server too. The gateway therefore remembers which requests were in
flight at a crash. A request that was in flight at two crashes is refused. If several requests were in flight at the
same two crashes, each is tried alone, so that only the one that crashes a server again is refused
(docs/decisions/0017-deadly-requests.md).

A request is identified by the hash of its endpoint and body, so a client's retry counts as the same request.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.errors import ApiError
from rollout_gateway.serving.replicas import Replica

log = get_logger("rollout_gateway.serving.deadly_requests")

_MAX_SUSPECTS = 4096
"""Maximum number of remembered requests. The oldest are forgotten first."""


@dataclass(eq=False)
class ServerProcess:
    """One process of an inference server."""

    replica: Replica
    incarnation: str
    retried: set[str] = field(default_factory=set)
    """Requests that were in flight at an earlier crash and that are in flight here, or were when this process
    crashed."""

    def has_crashed(self) -> bool:
        """Return whether a health check found the server down or running as another process."""
        replica = self.replica
        return not replica.suspected and (not replica.up or replica.incarnation != self.incarnation)


@dataclass(eq=False)
class _Suspect:
    """A request that was in flight when its server failed."""

    processes: list[ServerProcess] = field(default_factory=list)
    """The server processes that failed while it was in flight."""
    failed_at: float = 0.0
    refused: bool = False

    def crashes(self) -> list[ServerProcess]:
        return [process for process in self.processes if process.has_crashed()]


class Trial:
    """One attempt of a request that was in flight at an earlier crash. Ends with `answered`, `failed` or
    `abandoned`."""

    def __init__(self, requests: DeadlyRequests, request: str, process: ServerProcess, alone: bool) -> None:
        self._requests, self._request, self._process, self._alone = requests, request, process, alone
        process.retried.add(request)

    def answered(self) -> None:
        """The whole answer arrived, so the request does not crash servers: forget it."""
        self.abandoned()
        self._requests.suspects.pop(self._request, None)

    def abandoned(self) -> None:
        """The attempt ended without a result: the client disconnected, or the server took too long."""
        self._process.retried.discard(self._request)
        self.failed()

    def failed(self) -> None:
        """The server failed during the attempt."""
        if self._alone:
            self._alone = False
            self._requests.solo.release()


class DeadlyRequests:
    """The requests that were in flight when a server failed."""

    def __init__(self, keep_s: float) -> None:
        """`keep_s`: seconds after its last failure until a request is forgotten."""
        self._keep_s = keep_s
        self.suspects: OrderedDict[str, _Suspect] = OrderedDict()
        """Requests that were in flight at a failure, by hash."""
        self._processes: dict[str, ServerProcess] = {}
        """By replica name, the latest process that failed or that was sent a suspect request."""
        self.solo = asyncio.Lock()
        """Held while a request that was in flight at two crashes is tried alone."""

    def failed(self, request: str, replica: Replica, incarnation: str) -> None:
        """Record that the server process failed while `request` was in flight."""
        suspect = self.suspects.setdefault(request, _Suspect())
        suspect.failed_at = time.monotonic()
        self.suspects.move_to_end(request)
        process = self._process_of(replica, incarnation)
        if process not in suspect.processes:
            suspect.processes.append(process)
        while len(self.suspects) > _MAX_SUSPECTS:
            self.suspects.popitem(last=False)

    def server_checked(self, request: str) -> None:
        """Forget failures of `request` after which a health check found the same server process running."""
        suspect = self.suspects.get(request)
        if suspect is not None:
            suspect.processes = [p for p in suspect.processes if p.replica.suspected or p.has_crashed()]
            if not suspect.processes:
                del self.suspects[request]

    def check(self, request: str) -> None:
        """Raise a 502 `ApiError` if `request` must not be sent again."""
        suspect = self.suspects.get(request)
        if suspect is None:
            return
        if time.monotonic() - suspect.failed_at > self._keep_s:
            del self.suspects[request]
            return
        if not suspect.refused:
            crashes = suspect.crashes()
            if not any(process.retried == {request} for process in crashes[1:]):
                return
            suspect.refused = True
            log.error(
                "request refused: it was in flight at several crashes of its inference server",
                request=request,
                crashes=len(crashes),
            )
        raise ApiError(
            502,
            "deadly_request",
            f"This request was in flight at {len(suspect.processes)} crashes of its inference server "
            f"({', '.join(p.replica.name for p in suspect.processes)}) and most likely causes them, so it is not "
            f"sent again. Change it, or send it again in {self._keep_s:.0f} s (gateway.replicas.deadly_request_s). "
            "The inference server's log shows the cause of the crash.",
            headers=((b"x-should-retry", b"false"),),
        )

    async def admit(self, request: str) -> bool:
        """Wait until `request` may be sent. Return whether it now holds `solo`, because it was in flight at two
        crashes.

        Raises a 502 `ApiError` if it must not be sent again."""
        self.check(request)
        suspect = self.suspects.get(request)
        if suspect is None or len(suspect.crashes()) < 2:
            return False
        await self.solo.acquire()
        try:
            self.check(request)
        except ApiError:
            self.solo.release()
            raise
        return True

    def trial(self, request: str, replica: Replica, *, alone: bool) -> Trial | None:
        """Begin a trial if `request` was in flight at a crash; otherwise return `None`.

        `alone`: the request holds `solo`, which is released if no trial begins."""
        suspect = self.suspects.get(request)
        if suspect is None or not suspect.crashes():
            if alone:  # a retry of the same request was answered while this one waited
                self.solo.release()
            return None
        return Trial(self, request, self._process_of(replica, replica.incarnation), alone)

    def _process_of(self, replica: Replica, incarnation: str) -> ServerProcess:
        process = self._processes.get(replica.name)
        if process is None or process.incarnation != incarnation:
            process = self._processes[replica.name] = ServerProcess(replica, incarnation)
        return process
