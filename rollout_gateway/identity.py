"""Whose call it is: by URL, key, header or body, or by what its messages go on with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from pipeline.events import TrajectoryOpened
from pipeline.names import InvalidNameError, check_name
from rollout_gateway.errors import ApiError
from rollout_gateway.inference import Inference
from rollout_gateway.keys import KeyRing
from rollout_gateway.routing import Router
from rollout_gateway.trajectories import Keys, Registry, Trajectory
from rollout_gateway.wire import Call

Headers = dict[bytes, bytes]

TRAJECTORY_HEADER = b"x-journeyman-trajectory"
GROUP_HEADER = b"x-journeyman-group"
ATTEMPT_HEADER = b"x-journeyman-attempt"


def key_of(headers: Headers) -> str:
    """The bearer token, or `x-api-key` as Anthropic's clients send it."""
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return key if scheme.lower() == "bearer" else headers.get(b"x-api-key", b"").decode("latin-1")


@dataclass(eq=False, slots=True)
class _Named:
    """What a call says of itself."""

    trajectory: str = ""
    group: str = ""
    attempt: int = 0


class Identity:
    """Finds the trajectory of a call and checks its key."""

    def __init__(
        self, project: str, ring: KeyRing, registry: Registry, router: Router, inference: Inference | None
    ) -> None:
        self._project, self._ring, self._registry = project, ring, registry
        self._router, self._inference = router, inference

    def check(self, headers: Headers, *, operator: bool = False) -> None:
        """The key of a control call; raises `ApiError`."""
        self._ring.check(key_of(headers), operator=operator)

    async def check_for(self, headers: Headers, trajectory: str) -> None:
        """The same for a call about one trajectory, whose own key will do too."""
        key = key_of(headers)
        if self._ring.required and self._registry.keys.owner(key) == trajectory:
            found, _ = await self._registry.describe(trajectory)
            if self._registry.keys.fits(key, found.opened.key_hash):
                return
        self._ring.check(key)

    async def trajectory(self, url: str | None, headers: Headers, call: Call) -> Trajectory | None:
        """Whose call it is; none: no one's. Raises `ApiError`."""
        key = key_of(headers)
        named = _named(url, headers, call.asked.metadata)
        if key.startswith(Keys.prefix):
            try:
                found = await self._registry.by_key(key)
            except InvalidNameError as error:  # a key that is none may name anything
                raise ApiError(
                    401, "This API key belongs to no trajectory.", kind="authentication_error", code="invalid_api_key"
                ) from error  # fmt: skip
            if named.trajectory and named.trajectory != found.id:
                raise ApiError(
                    403,
                    "This API key belongs to another trajectory.",
                    kind="permission_error",
                    code="wrong_key",
                )
            return found
        self._ring.check(key)
        if named.trajectory:
            return await self._find_or_open(named, call)
        if self._inference is not None and call.fields.get("messages") is not None:
            self._router.check(call.asked.model, None)
            return await self._inference.find(call, self._router.name(call.asked.model))
        return None

    async def _find_or_open(self, named: _Named, call: Call) -> Trajectory:
        """A call that names a group too opens its trajectory where there is none yet."""
        try:
            return await self._registry.find(named.trajectory)
        except InvalidNameError as error:
            raise ApiError(400, str(error), code="invalid_name") from error
        except ApiError as error:
            if error.code != "trajectory_not_found" or not named.group:
                raise
        self._router.check(call.asked.model, None)
        try:
            check_name(named.trajectory)
            check_name(named.group)
        except InvalidNameError as error:
            raise ApiError(400, str(error), code="invalid_name") from error
        event = TrajectoryOpened(
            project=self._project,
            trajectory=named.trajectory,
            model=self._router.name(call.asked.model),
            group=named.group,
            attempt=named.attempt,
            key_hash=self._registry.keys.hash(self._registry.keys.make(named.trajectory)),
        )
        return await self._registry.open(event, "")


def _named(url: str | None, headers: Headers, metadata: dict[str, Any] | None) -> _Named:
    out = _Named(url or "")
    if metadata:
        out.trajectory = out.trajectory or str(metadata.get("journeyman_trajectory") or "")
        out.group = str(metadata.get("journeyman_group") or "")
    if not out.trajectory:
        out.trajectory = unquote(headers.get(TRAJECTORY_HEADER, b"").decode("latin-1"))
    if GROUP_HEADER in headers:
        out.group = unquote(headers[GROUP_HEADER].decode("latin-1"))
    attempt = headers.get(ATTEMPT_HEADER, b"0")
    out.attempt = int(attempt) if attempt.isdigit() and len(attempt) < 9 else 0
    return out
