"""Whose call it is: by URL, key, header or body, or by what its messages go on with. And what its key permits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

from pipeline.events import TrajectoryOpened
from pipeline.names import InvalidNameError, check_name
from rollout_gateway.access.api_keys import Access, ApiKeys
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.detection import Inference
from rollout_gateway.capture.runs import Trajectory
from rollout_gateway.capture.trajectories import Registry
from rollout_gateway.dialects.calls import Call
from rollout_gateway.http.errors import ApiError, invalid_key, unknown_trajectory, wrong_key
from rollout_gateway.serving.routing import Router

Headers = dict[bytes, bytes]
KeyKind = Literal["", "call", "agent", "operator", "trajectory"]
"""Whose key a route takes, where keys are configured. `call`: any; `agent`: a person's or program's that is not for calls
only; `trajectory`: that, or the key of the trajectory in the path."""

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
        self, project: str, api_keys: ApiKeys, registry: Registry, router: Router, inference: Inference | None
    ) -> None:
        self._project, self._api_keys, self._registry = project, api_keys, registry
        self._router, self._inference = router, inference

    # -- by the head of a request: nothing is read from the log ----------------------------------------------------

    def admit(self, headers: Headers, wanted: KeyKind, trajectory: str | None) -> Access:
        """What the key of a request permits; `trajectory` is what its path names. Raises a 401, 403 or 429 `ApiError`."""
        key = key_of(headers)
        if key.startswith(TrajectoryTokens.prefix):
            own = self._registry.tokens.verify(key)
            if own is None:
                raise invalid_key()
            if wanted not in ("call", "trajectory"):
                raise wrong_key("A trajectory's key makes its calls and looks at it, and nothing else.", "wrong_role")  # fmt: skip
            if trajectory is not None and trajectory != own:
                raise wrong_key("This API key belongs to another trajectory.", "wrong_key")
            return Access(trajectory=own)
        access = self._api_keys.authenticate(key)
        if wanted == "operator" and not access.operator:
            raise wrong_key("This takes an operator's key.", "wrong_role")
        if access.calls_only and wanted != "call":
            raise wrong_key("This API key makes model calls only.", "wrong_role")
        return access

    # -- then ------------------------------------------------------------------------------------------------------

    async def reach(self, access: Access, trajectory: str, *, complete: bool = False) -> None:
        """Let a caller pass who may look at a trajectory, or complete it. One that may not learns as much as if there were
        none: a 404 `ApiError`; a 403 one for a trajectory's own key that may not complete it."""
        if access.operator or (access.trajectory and not complete):
            return
        opened = await self._registry.opened(trajectory)
        if opened is None:
            raise unknown_trajectory(trajectory)
        if not access.trajectory:
            self._check_owner(access, opened)
        elif not opened.key_completes:
            raise wrong_key(
                "This trajectory's key does not complete it: open it with `key_completes`, or use the key that opened it.",
                "key_does_not_complete",
            )

    def _check_owner(self, access: Access, opened: TrajectoryOpened) -> None:
        if not access.owns(opened.owner):
            raise unknown_trajectory(opened.trajectory)

    async def trajectory(
        self, access: Access, url: str | None, headers: Headers, call: Call
    ) -> Trajectory | None:
        """Whose call it is; `None` for no one's. Raises `ApiError`."""
        named = _named(url, headers, call.params.metadata)
        if access.trajectory:
            if named.trajectory and named.trajectory != access.trajectory:
                raise wrong_key("This API key belongs to another trajectory.", "wrong_key")
            return await self._own(access.trajectory)
        if access.models:
            access.check_model(self._router.name(call.params.model))
        if named.trajectory:
            return await self._find_or_open(named, call, access)
        if self._inference is not None and call.fields.get("messages") is not None:
            self._router.check(call.params.model, None)
            return await self._inference.find(call, self._router.name(call.params.model), access.owner)
        return None

    async def held(self, access: Access, url: str | None, headers: Headers) -> Trajectory | None:
        """The trajectory that a caller names and may read, open or completed; `None` where it names none. The rules are those of
        a call. Raises `ApiError`."""
        name = _named(url, headers, None).trajectory
        if access.trajectory:
            if name and name != access.trajectory:
                raise wrong_key("This API key belongs to another trajectory.", "wrong_key")
            await self.charge(access.trajectory)
        elif name:
            await self.reach(access, name)
        name = access.trajectory or name
        return await self._registry.held(name) if name else None

    async def charge(self, trajectory: str) -> TrajectoryOpened:
        """A request with a trajectory's own key counts as one of the key that opened it, and ends with that key. Raises a
        401, 403 or 429 `ApiError`. Returns the trajectory's opening."""
        opened = await self._registry.opened(trajectory)
        if opened is None:
            raise unknown_trajectory(trajectory)
        self._api_keys.charge(opened.owner, opened.model)
        return opened

    async def _own(self, trajectory: str) -> Trajectory:
        """The trajectory of a key that is its own. The key that opened it is charged before much is read."""
        found = self._registry.get(trajectory)
        if found is None:
            await self.charge(trajectory)
            return await self._registry.find(trajectory)
        self._api_keys.charge(found.opened.owner, found.opened.model)
        return found

    async def _find_or_open(self, named: _Named, call: Call, access: Access) -> Trajectory:
        """A call that names a group too opens its trajectory where there is none yet."""
        try:
            found = self._registry.get(named.trajectory)
            if not access.operator:
                opened = found.opened if found is not None else await self._registry.opened(named.trajectory)
                if opened is not None:
                    self._check_owner(access, opened)
                elif not named.group:
                    raise unknown_trajectory(named.trajectory)
            return found or await self._registry.find(named.trajectory)
        except InvalidNameError as error:
            raise ApiError(400, str(error), code="invalid_name") from error
        except ApiError as error:
            if error.code != "trajectory_not_found" or not named.group:
                raise
        self._router.check(call.params.model, None)
        try:
            check_name(named.trajectory)
            check_name(named.group)
        except InvalidNameError as error:
            raise ApiError(400, str(error), code="invalid_name") from error
        event = TrajectoryOpened(
            project=self._project,
            trajectory=named.trajectory,
            model=self._router.name(call.params.model),
            group=named.group,
            attempt=named.attempt,
            key_hash=self._registry.tokens.digest(self._registry.tokens.issue(named.trajectory)),
            owner=access.owner,
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
