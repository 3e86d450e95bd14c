"""Requests that kill their inference server: found by the deaths that they were in flight at, and refused.

A server that dies takes every call in flight with it, and the gateway asks again for each. Where one of them is what killed
the server, asking again kills the next one. So the gateway notes which requests were in flight at a death. A request that was in
flight at two is refused. Where several were in flight at the same two deaths, each is tried alone, so that only the one that kills
again is refused (docs/decisions/0017-deadly-requests.md).

Requests are known by the hash of their endpoint and body, so a client's retry is the same request.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.errors import ApiError
from rollout_gateway.serving.replicas import Replica

log = get_logger("rollout_gateway.serving.blame")

_KEPT = 4096
"""Requests that are remembered at most; the oldest are forgotten first."""


@dataclass(eq=False)
class Life:
    """One life of an inference server, from its start to its death."""

    replica: Replica
    incarnation: str
    suspects: set[str] = field(default_factory=set)
    """Requests that had been in flight at a death before, and were in flight here when this life ended."""

    def over(self) -> bool:
        """The server was found dead, or another life of it has been seen."""
        return not self.replica.doubted and (
            not self.replica.up or self.replica.incarnation != self.incarnation
        )


@dataclass(eq=False)
class _Case:
    """One request that was in flight when its server failed."""

    lives: list[Life] = field(default_factory=list)
    at: float = 0.0
    refused: bool = False

    def deaths(self) -> int:
        return sum(life.over() for life in self.lives)


class Trial:
    """One try of a request that was in flight at a death before. Ends with `answered`, `broke` or `left`."""

    def __init__(self, blame: Blame, request: str, life: Life, alone: bool) -> None:
        self._blame, self._request, self._life, self._alone = blame, request, life, alone
        life.suspects.add(request)

    def answered(self) -> None:
        """The whole answer came."""
        self.left()
        self._blame.acquit(self._request)

    def left(self) -> None:
        """It is in flight no more, and nothing is known of it: the client left, or time was up."""
        self._life.suspects.discard(self._request)
        self.broke()

    def broke(self) -> None:
        """The server failed."""
        if self._alone:
            self._alone = False
            self._blame.turn.release()


class Blame:
    """What is known of requests that were in flight at a death. `keep_s`: how long it is remembered."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self.cases: OrderedDict[str, _Case] = OrderedDict()
        self._lives: dict[str, Life] = {}
        """The present life of each replica that failed or was tried with a suspect, by the replica's name."""
        self.turn = asyncio.Lock()
        """Held while a request that shares two deaths with others is tried."""

    def broke(self, request: str, replica: Replica, incarnation: str) -> None:
        """The server failed, in that life, while `request` was in flight."""
        case = self.cases.setdefault(request, _Case())
        case.at = time.monotonic()
        self.cases.move_to_end(request)
        life = self._life(replica, incarnation)
        if life not in case.lives:
            case.lives.append(life)
        while len(self.cases) > _KEPT:
            self.cases.popitem(last=False)

    def looked(self, request: str) -> None:
        """Forget failures that were no death: the server lives on."""
        case = self.cases.get(request)
        if case is not None:
            case.lives = [life for life in case.lives if life.replica.doubted or life.over()]
            if not case.lives:
                del self.cases[request]

    def acquit(self, request: str) -> None:
        """The request was answered, so it kills nothing."""
        self.cases.pop(request, None)

    def check(self, request: str) -> None:
        """Raises a 502 `ApiError` for a request that is not to be sent again."""
        case = self.cases.get(request)
        if case is None:
            return
        if time.monotonic() - case.at > self._keep_s:
            del self.cases[request]
            return
        dead = [life for life in case.lives if life.over()]
        if not case.refused and (len(dead) < 2 or not any(life.suspects == {request} for life in dead[1:])):
            return
        if not case.refused:
            log.error("a request is refused", request=request, deaths=len(dead))
        case.refused = True
        raise ApiError(
            502,
            f"This request was in flight at {len(case.lives)} deaths of its inference server "
            f"({', '.join(life.replica.name for life in case.lives)}) and most likely causes them, so it is not sent again. "
            f"Change it, or send it again in {self._keep_s:.0f} s (gateway.replicas.deadly_request_s). The server's log says why it died.",
            kind="api_error",
            code="deadly_request",
            headers=((b"x-should-retry", b"false"),),
        )

    async def wait_turn(self, request: str) -> bool:
        """Before a request is tried: whether it holds `turn`, because it shares two deaths with other requests."""
        case = self.cases.get(request)
        if case is None or case.deaths() < 2:
            return False
        await self.turn.acquire()
        return True

    def trial(self, request: str, replica: Replica, *, alone: bool) -> Trial | None:
        """The try of a request that was in flight at a death before; none for any other request."""
        case = self.cases.get(request)
        if case is None or not case.deaths():
            if alone:  # it was answered elsewhere while it waited
                self.turn.release()
            return None
        return Trial(self, request, self._life(replica, replica.incarnation), alone)

    def _life(self, replica: Replica, incarnation: str) -> Life:
        life = self._lives.get(replica.name)
        if life is None or life.incarnation != incarnation:
            life = self._lives[replica.name] = Life(replica, incarnation)
        return life
