"""Finds the trajectory of a call (by key, URL, body, header or messages), and checks what the caller's key permits.

`app` calls `admit` when a request's head has come, before anything is read for it, and the other methods once its body
is there. A "token" is the API key of a single trajectory (`access.trajectory_tokens`). Requests are counted as calls of
the key, or of the key that opened the token's trajectory (`access.api_keys`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from pipeline.events import TrajectoryOpened
from pipeline.names import check_name
from rollout_gateway.access.api_keys import Access, ApiKeys
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.detection import TrajectoryDetector
from rollout_gateway.capture.registry import Registry
from rollout_gateway.capture.trajectory import Trajectory
from rollout_gateway.dialects.calls import Call
from rollout_gateway.http.errors import ApiError, invalid_key
from rollout_gateway.http.request import Headers, Request
from rollout_gateway.serving.routing import VersionRouter

KeyKind = Literal["none", "call", "agent", "operator", "trajectory", "completion", "feedback"]
"""The key that a route takes, if keys are configured. `call`: any key but one for feedback only; `agent`: a key that is
neither for calls only nor for feedback only; `operator`: an operator's; `trajectory`: as `agent`, or the token of the
trajectory in the path; `completion`: the same, of a token only if the trajectory was opened with `key_completes`;
`feedback`: as `completion`, or a feedback key, and the handler checks whose the trajectory is; `none`: no key is looked
at."""

_CALL_BYTES = 1 << 20
"""Bytes of a body for which a further call is counted."""
TRAJECTORY_HEADER = b"x-journeywork-trajectory"
GROUP_HEADER = b"x-journeywork-group"


class NamedRun(NamedTuple):
    """The trajectory and group that a call names."""

    names: tuple[str, ...]
    """The trajectory's id in URL, body and header; empty where none is. The first one counts."""
    group: str
    """Empty if it names none."""

    @property
    def trajectory(self) -> str:
        """The one that counts; empty if there is none."""
        return next(filter(None, self.names), "")


class CallIdentifier:
    """Identifies who sends a request, by its key, and the trajectory that a model call belongs to."""

    def __init__(
        self,
        project: str,
        api_keys: ApiKeys,
        registry: Registry,
        router: VersionRouter,
        detector: TrajectoryDetector | None,
    ) -> None:
        """`detector` finds the trajectories of calls that name none; `None` leaves them without one."""
        self._project, self._api_keys, self._registry = project, api_keys, registry
        self._router, self._detector = router, detector

    # -- by the head of a request. Nothing is read from the log ----------------------------------------------------

    def admit(self, headers: Headers, wanted: KeyKind, trajectory: str, size: int) -> Access:
        """Check a request's key, count the request as one call and one for each MiB of its body, and return the key's
        permissions. `wanted`: the kind of key that the route takes. `trajectory`: the one named in the path, or empty.
        `size`: bytes of the body as far as the head says them. What can't be counted yet, `charge_body` counts.

        Raises an `ApiError`: 401 for an invalid key, 403 for one that does not permit this, 429 for too many
        requests."""
        key = _key_of(headers)
        if key.startswith(TrajectoryTokens.prefix):
            own = self._registry.tokens.verify(key)
            if own is None:
                raise invalid_key()
            if wanted not in ("call", "trajectory", "completion", "feedback"):
                message = "A trajectory's key can only make the trajectory's calls, read it, complete it and rate it."
                raise ApiError(403, "wrong_role", message)
            check_own_trajectory(trajectory, own)
            run = self._registry.get(own)
            if run is not None:
                self._api_keys.charge(run.opened.owner, run.opened.named, 1 + size // _CALL_BYTES)
            return Access(trajectory=own, charged=run is not None)
        access = self._api_keys.authenticate(key, 1 + size // _CALL_BYTES)
        if wanted == "operator" and not access.operator:
            raise ApiError(403, "wrong_role", "This request needs an operator's key.")
        if access.calls_only and wanted != "call":
            raise ApiError(403, "wrong_role", "This API key is for model calls only.")
        if access.feedback_only and wanted != "feedback":
            raise ApiError(403, "wrong_role", "This API key is for feedback only.")
        return access

    # -- with the body ---------------------------------------------------------------------------------------------

    async def authorize(self, access: Access, wanted: KeyKind, trajectory: str) -> Access:
        """Check that the caller may use a control route, which is about `trajectory` if `wanted` is `trajectory` or
        `completion`. Returns its permissions; those of a token with the model of its trajectory, which it may see.

        Raises `ApiError`: a 403 for a token that may not complete its trajectory, and a 404 for a trajectory of another
        key, as for one that does not exist."""
        if access.trajectory:
            opened = (await self._registry.find_to_read(access.trajectory)).opened
            if wanted in ("completion", "feedback") and not opened.key_completes:
                message = (
                    "This trajectory's key can't complete it or give feedback on it. Open with `key_completes`, or use "
                    "the opener's key."
                )
                raise ApiError(403, "key_does_not_complete", message)
            return replace(access, models=frozenset((opened.named,)))
        if wanted in ("trajectory", "completion") and not access.operator:
            await self._registry.opening_for(trajectory, access)
        return access

    async def charge_body(self, access: Access, request: Request) -> None:
        """Count what `admit` could not, now that the log may be read and the body is there: a request with the token of
        a trajectory that was not in memory, and a body in chunks, whose size the head does not say. Raises an
        `ApiError`: 401 if the key behind the token is revoked or expired, 403 if it no longer permits the model, 429
        for too many."""
        calls = len(request.body) // _CALL_BYTES
        if access.trajectory and not access.charged:
            opened = (await self._registry.find_to_read(access.trajectory)).opened
            self._api_keys.charge(opened.owner, opened.named, 1 + calls)
        elif calls and b"content-length" not in request.headers:
            self._api_keys.spend(request.owner, calls, feedback_only=access.feedback_only)

    async def find_trajectory(
        self, access: Access, url: str, headers: Headers, call: Call, *, detect: bool = True
    ) -> Trajectory | None:
        """Return the open trajectory of a call, opened if the call may open it; `None` if the call belongs to none.
        `url`: the trajectory that the path names, or empty. `detect`: whether the detector may tell the trajectory by
        the call's messages, which must be complete then. Raises `ApiError`."""
        named = named_run(url, headers, call.params.metadata)
        if access.trajectory:
            for name in named.names:
                check_own_trajectory(name, access.trajectory)
            return await self._registry.find(access.trajectory)
        model = self._router.name(call.params.model)
        access.check_model(model)
        if named.trajectory:
            return await self._find_or_open(named, call, access)
        if detect and self._detector is not None and call.fields.get("messages") is not None:
            self._router.check(call.params.model, None)
            return await self._detector.find(call, model, access.owner)
        return None

    async def _find_or_open(self, named: NamedRun, call: Call, access: Access) -> Trajectory:
        """Return the named trajectory. One that does not exist is opened if the call names a group too. Raises a 404
        `ApiError` if it names none."""
        try:
            if not access.operator:
                await self._registry.opening_for(named.trajectory, access)
            return await self._registry.find(named.trajectory)
        except ApiError as error:
            if error.code != "trajectory_not_found" or not named.group:
                raise
        self._router.check(call.params.model, None)
        check_name(named.trajectory)
        check_name(named.group)
        event = TrajectoryOpened(
            project=self._project,
            trajectory=named.trajectory,
            model=self._router.name(call.params.model),
            group=named.group,
            owner=access.owner,
        )
        return await self._registry.open(event, "", access)


def _key_of(headers: Headers) -> str:
    """Return the API key of a request: the bearer token, or `x-api-key` as Anthropic's clients send it."""
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return key if scheme.lower() == "bearer" else headers.get(b"x-api-key", b"").decode("latin-1")


def check_own_trajectory(named: str, own: str) -> None:
    """Raise a 403 `ApiError` if a request with the token of the trajectory `own` names another one. `named` is empty if
    it names none."""
    if named and named != own:
        raise ApiError(403, "wrong_key", "This API key belongs to another trajectory.")


def named_run(url: str, headers: Headers, metadata: dict[str, Any] | None) -> NamedRun:
    """Return the trajectory and group that a call names, unchecked. `url`: the trajectory in its path, or empty;
    `metadata`: that of its body. The group is that of the header, else of the body."""
    body = metadata or {}
    names = (url, str(body.get("journeywork_trajectory") or ""), decode_header(headers, TRAJECTORY_HEADER))
    group = (
        decode_header(headers, GROUP_HEADER) if GROUP_HEADER in headers else str(body.get("journeywork_group") or "")
    )
    return NamedRun(names, group)


def decode_header(headers: Headers, header: bytes) -> str:
    """Return the name that a header holds percent-encoded, decoded; empty if the header is missing."""
    return unquote(headers.get(header, b"").decode("latin-1"))
