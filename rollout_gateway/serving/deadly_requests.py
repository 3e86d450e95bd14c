"""Finds requests that kill their inference server, and refuses them.

A server that dies takes every call in flight with it, and the gateway asks again for each of them. If one of these
calls killed the server, asking again kills the next one. So the gateway notes which requests were in flight when a
server died. A request that was in flight at two deaths is refused. If several requests were in flight at the same two
deaths, each is tried alone, so that only the one that kills again is refused (docs/decisions/0017-deadly-requests.md).

A request is identified by the hash of its endpoint and body, so a client's retry is the same request.
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

_MOST_CASES = 4096
"""Requests that are remembered at most. The oldest are forgotten first."""


@dataclass(eq=False)
class ServerLife:
    """One process of an inference server, from its start to its death."""

    replica: Replica
    incarnation: str
    suspects: set[str] = field(default_factory=set)
    """Requests that are in flight here, or were when this process died, and had been in flight at an earlier death."""

    def is_over(self) -> bool:
        """Whether the server was found dead, or another process has been seen in its place."""
        replica = self.replica
        return not replica.suspected and (not replica.up or replica.incarnation != self.incarnation)


@dataclass(eq=False)
class _Case:
    """A request that was in flight when its server failed."""

    lives: list[ServerLife] = field(default_factory=list)
    failed_at: float = 0.0
    refused: bool = False

    def deaths(self) -> list[ServerLife]:
        return [life for life in self.lives if life.is_over()]


class Trial:
    """One attempt of a request that was in flight at an earlier death. Ends with `answered`, `failed` or
    `abandoned`."""

    def __init__(self, requests: DeadlyRequests, request: str, life: ServerLife, alone: bool) -> None:
        self._requests, self._request, self._life, self._alone = requests, request, life, alone
        life.suspects.add(request)

    def answered(self) -> None:
        """The whole answer arrived, so the request kills nothing."""
        self.abandoned()
        self._requests.cases.pop(self._request, None)

    def abandoned(self) -> None:
        """The request is no longer in flight and nothing was learned: the client left, or the server took too long."""
        self._life.suspects.discard(self._request)
        self.failed()

    def failed(self) -> None:
        """The server failed."""
        if self._alone:
            self._alone = False
            self._requests.turn.release()


class DeadlyRequests:
    """The requests that were in flight when a server failed."""

    def __init__(self, keep_s: float) -> None:
        """`keep_s`: seconds after which a request is forgotten."""
        self._keep_s = keep_s
        self.cases: OrderedDict[str, _Case] = OrderedDict()
        """Suspect requests by hash."""
        self._lives: dict[str, ServerLife] = {}
        """By replica name, the latest process that failed or was given a suspect request."""
        self.turn = asyncio.Lock()
        """Held while a request that shares two deaths with others is tried."""

    def failed(self, request: str, replica: Replica, incarnation: str) -> None:
        """Note that the server process failed while `request` was in flight."""
        case = self.cases.setdefault(request, _Case())
        case.failed_at = time.monotonic()
        self.cases.move_to_end(request)
        life = self._life(replica, incarnation)
        if life not in case.lives:
            case.lives.append(life)
        while len(self.cases) > _MOST_CASES:
            self.cases.popitem(last=False)

    def server_checked(self, request: str) -> None:
        """Forget failures of `request` that were no deaths, because the server lives."""
        case = self.cases.get(request)
        if case is not None:
            case.lives = [life for life in case.lives if life.replica.suspected or life.is_over()]
            if not case.lives:
                del self.cases[request]

    def check(self, request: str) -> None:
        """Raises a 502 `ApiError` for a request that must not be sent again."""
        case = self.cases.get(request)
        if case is None:
            return
        if time.monotonic() - case.failed_at > self._keep_s:
            del self.cases[request]
            return
        if not case.refused:
            deaths = case.deaths()
            if not any(life.suspects == {request} for life in deaths[1:]):
                return
            case.refused = True
            log.error(
                "request refused: it was in flight at deaths of its server",
                request=request,
                deaths=len(deaths),
            )
        raise ApiError(
            502,
            "deadly_request",
            f"This request was in flight at {len(case.lives)} deaths of its inference server "
            f"({', '.join(life.replica.name for life in case.lives)}) and most likely causes them, so it is not "
            f"sent again. Change it, or send it again in {self._keep_s:.0f} s (gateway.replicas.deadly_request_s). "
            "The server's log says why it died.",
            headers=((b"x-should-retry", b"false"),),
        )

    async def admit(self, request: str) -> bool:
        """Wait until `request` may be tried. Returns whether it holds `turn`, because it shares two deaths with other
        requests.

        Raises a 502 `ApiError` for a request that must not be sent again."""
        self.check(request)
        case = self.cases.get(request)
        if case is None or len(case.deaths()) < 2:
            return False
        await self.turn.acquire()
        try:
            self.check(request)
        except ApiError:
            self.turn.release()
            raise
        return True

    def trial(self, request: str, replica: Replica, *, alone: bool) -> Trial | None:
        """Begin a trial if `request` was in flight at a death. `alone`: it holds `turn`, which is released if there is
        no trial."""
        case = self.cases.get(request)
        if case is None or not case.deaths():
            if alone:  # it was answered elsewhere while it waited
                self.turn.release()
            return None
        return Trial(self, request, self._life(replica, replica.incarnation), alone)

    def _life(self, replica: Replica, incarnation: str) -> ServerLife:
        life = self._lives.get(replica.name)
        if life is None or life.incarnation != incarnation:
            life = self._lives[replica.name] = ServerLife(replica, incarnation)
        return life
