"""The control API: opening, completing and looking at trajectories, and at policy versions."""

from __future__ import annotations

import asyncio
import heapq
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote

import msgspec

from pipeline.config import GatewayConfig
from pipeline.events import Outcome, TrajectoryCompleted, TrajectoryOpened
from pipeline.log.broker import BrokerError
from pipeline.names import MAX_NAME, InvalidNameError, check_name, new_id, parse_version
from rollout_gateway.access.api_keys import FULL_ACCESS, Access
from rollout_gateway.api.log_health import LogHealth
from rollout_gateway.capture.runs import Trajectory
from rollout_gateway.capture.trajectories import Completion, Registry
from rollout_gateway.http.errors import ApiError, invalid_json, unavailable, unknown_model, unknown_trajectory
from rollout_gateway.serving.pacing import Pacing
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.replicas import Fleet
from rollout_gateway.serving.routing import Router

_CHARACTER = r"([^\p{C}\p{Z}]| )"
Name = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": f"^{_CHARACTER}{{1,{MAX_NAME}}}$"})]
"""What `pipeline.names` takes, as the API's document has it."""
OptionalName = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": f"^{_CHARACTER}{{0,{MAX_NAME}}}$"})]
Count = Annotated[float, msgspec.Meta(ge=0, lt=2**31, multiple_of=1)]
"""A whole number; to JSON 3.0 is one too."""
_COUNTS = ("group_size", "attempt")
_MAX_NUMBERS = 256
Numbers = Annotated[dict[str, float], msgspec.Meta(max_length=_MAX_NUMBERS)]
"""Finite numbers by name: JSON has no others."""


class Opening(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/trajectories`."""

    model: str
    group: OptionalName = ""
    """Empty: a group of its own."""
    task: str = ""
    id: OptionalName = ""
    split: Literal["train", "val"] = "train"
    group_size: Count = 0
    attempt: Count = 0
    metadata: dict[str, Any] = {}
    pinned: str = ""
    key_completes: bool = False
    """Whether the trajectory's own key may complete it, and so say what it was worth."""


class CompletionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/trajectories/{trajectory}/complete`."""

    reward: float | None = None
    rewards: Numbers = {}
    metrics: Numbers = {}
    metadata: dict[str, Any] = {}
    outcome: Outcome = "scored"


class GroupMember(CompletionBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One trajectory of a group, with its result."""

    id: Name


class GroupBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/groups/{group}/complete`."""

    trajectories: list[GroupMember]


_T = TypeVar("_T")

_LOOKED_AT = 1000
"""Trajectories that a list looks at before other tasks get a turn: about a millisecond."""
_LISTED_BYTES = 1_000_000
"""Bytes of metadata after which a page of a list ends."""


def read_body(body: bytes, kind: type[_T]) -> _T:
    """`body` as `kind`; raises a 400 `ApiError` that says what is wrong with it."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise _invalid_body(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_json(str(error)) from error


def _invalid_body(detail: str) -> ApiError:
    """A 400 that names the field where msgspec's `detail` does."""
    where = re.search(r" - at `\$\.([^`]*)`$", detail)
    unknown = re.search(r"unknown field `([^`]*)`", detail)
    param = where[1] if where else None
    if param in _COUNTS:
        detail = f"{param} is a whole number from 0 to {2**31 - 1}"
    elif unknown:
        param = f"{param}.{unknown[1]}" if param else unknown[1]
    return ApiError(400, f"The body is not valid: {detail}.", code="invalid_body", param=param)


class Control:
    """What the routes of the control API do. Bodies in, JSON-ready answers out; raises `ApiError`."""

    def __init__(
        self,
        project: str,
        config: GatewayConfig,
        policies: Policies,
        fleet: Fleet,
        registry: Registry,
        router: Router,
        pacing: Pacing,
        log_health: LogHealth,
    ) -> None:
        self._project, self._policies, self._fleet = project, policies, fleet
        self._max_reward = config.max_reward
        self._pacing, self._log_health = pacing, log_health
        self._registry, self._router = registry, router

    async def open(
        self, body: bytes, base_url: str, traceparent: str, access: Access = FULL_ACCESS
    ) -> dict[str, Any]:
        """Open a trajectory, which belongs to the caller's key. Naming an `id` makes it safe to repeat."""
        opening = read_body(body, Opening)
        access.check_model(self._router.name(opening.model))
        self._check_opened_model(opening.model, access)
        trajectory = opening.id or new_id("t")
        try:
            _check_path_name(trajectory)
            _check_path_name(opening.group or trajectory)
        except InvalidNameError as error:
            raise ApiError(400, str(error), code="invalid_name") from error
        if opening.pinned:
            self._check_pinned(opening)
        paced_s = self._pacing.admit(opening.model, opening.group or trajectory, opening.split)
        key = self._registry.tokens.issue(trajectory)
        event = TrajectoryOpened(
            project=self._project,
            trajectory=trajectory,
            model=opening.model,
            group=opening.group or trajectory,
            task=opening.task,
            attempt=int(opening.attempt),
            split=opening.split,
            group_size=int(opening.group_size),
            key_hash=self._registry.tokens.digest(key),
            pinned=opening.pinned,
            metadata=msgspec.json.encode(opening.metadata),
            paced_s=paced_s,
            owner=access.owner,
            key_completes=opening.key_completes,
        )
        try:
            opened = await self._registry.open(event, traceparent)
        except BrokerError as error:
            raise _no_log(error) from error
        return {
            "id": trajectory,
            "object": "trajectory",
            "model": opened.opened.model,
            "group": opened.opened.group,
            "api_key": key,
            "base_url": f"{base_url}/t/{quote(trajectory, safe='')}/v1",
        }

    def _check_opened_model(self, model: str, access: Access) -> None:
        """Raises a 404 `ApiError` for what is not a model's name."""
        if model in self._policies.models:
            return
        error = unknown_model(model, [name for name in self._policies.models if access.sees(name)])
        name = self._router.name(model)
        if name in self._policies.models:
            error.message = f"{model!r} names a version, not a model: open with the name {name!r}. To fix a version use `pinned`."
        raise error

    def _check_pinned(self, opening: Opening) -> None:
        if not self._policies.offered(opening.pinned) or parse_version(opening.pinned)[0] != opening.model:
            versions = [name for name in self._policies.names(opening.model) if name != opening.model]
            error = unknown_model(opening.pinned, versions)
            error.message = (
                f"{opening.pinned!r} is no version that can be pinned. There are: {', '.join(versions)}."
            )
            error.param = "pinned"
            raise error

    async def complete(self, trajectory: str, body: bytes) -> dict[str, Any]:
        """End a trajectory. The same again is answered alike."""
        read = read_body(body, CompletionBody)
        self._check_rewards(read)
        return await self._complete(trajectory, read)

    def _check_rewards(self, read: CompletionBody) -> None:
        rewards = {
            "reward": read.reward,
            **{f"rewards.{name}": value for name, value in read.rewards.items()},
        }
        for name, value in rewards.items():
            if value is not None and abs(value) > self._max_reward:
                raise ApiError(
                    400,
                    f"{name} is {value:g}: gateway.max_reward allows rewards from -{self._max_reward:g} to "
                    f"{self._max_reward:g}.",
                    code="reward_out_of_range",
                    param=name,
                )
        # Where `reward` is missing, the judge adds the named ones up.
        total = sum(read.rewards.values())
        if not abs(total) <= self._max_reward:
            raise ApiError(
                400,
                f"The sum of rewards is {total:g}: gateway.max_reward allows sums from -{self._max_reward:g} to "
                f"{self._max_reward:g} too.",
                code="reward_out_of_range",
                param="rewards",
            )

    async def _complete(self, trajectory: str, read: CompletionBody) -> dict[str, Any]:
        completion = Completion(
            reward=read.reward,
            rewards=read.rewards,
            metrics=read.metrics,
            metadata=msgspec.Raw(msgspec.json.encode(read.metadata)),
            outcome=read.outcome,
        )
        try:
            event = await self._registry.complete(trajectory, completion)
        except BrokerError as error:
            raise _no_log(error) from error
        return {
            "id": trajectory,
            "object": "trajectory",
            "outcome": event.outcome,
            "reward": event.reward,
            "exchanges": event.exchanges,
        }

    async def complete_group(self, group: str, body: bytes, access: Access = FULL_ACCESS) -> dict[str, Any]:
        """End all trajectories of a group: each on its own, so that a repetition after a failure does the rest."""
        members = read_body(body, GroupBody).trajectories
        for member in members:
            self._check_rewards(member)
            opened = await self._registry.opened(member.id)
            if opened is None or not access.owns(opened.owner):
                raise unknown_trajectory(member.id)
            if opened.group != group:
                raise ApiError(
                    400, f"Trajectory {member.id!r} is not of group {group!r}.", code="wrong_group"
                )
        data = [await self._complete(member.id, member) for member in members]
        return {"object": "list", "group": group, "data": data}

    async def list(self, query: dict[str, str], access: Access = FULL_ACCESS) -> dict[str, Any]:
        """The caller's open trajectories in this replica's memory, newest first, a page at a time: `after` is the last id
        of the page before. All that ever were: `journeyman sql`. Other tasks run while it looks."""
        asked = query.get("limit", "100")
        if not (asked.isascii() and asked.isdigit() and 1 <= int(asked[:5]) <= 1000):
            raise ApiError(400, "limit is a number from 1 to 1000.", code="invalid_query", param="limit")
        limit, before = int(asked), (math.inf, "")
        if "after" in query:
            last = self._registry.get(query["after"])
            if last is None or not access.owns(last.opened.owner):
                raise ApiError(400, "after names no open trajectory.", code="invalid_query", param="after")
            before = (last.opened.at, last.id)
        group, model = query.get("group"), query.get("model")
        newest: list[tuple[float, str, Trajectory]] = []
        for number, found in enumerate(self._registry.known(), 1):
            if not number % _LOOKED_AT:
                await asyncio.sleep(0)
            opened = found.opened
            if (
                access.owns(opened.owner)
                and (group is None or group == opened.group)
                and (model is None or model == opened.model)
                and (opened.at, opened.trajectory) < before
            ):
                entry = (opened.at, opened.trajectory, found)
                if len(newest) <= limit:
                    heapq.heappush(newest, entry)
                elif newest[0] < entry:
                    heapq.heapreplace(newest, entry)
        newest.sort(reverse=True)
        data, size = [], 0
        for _, _, found in newest[:limit]:
            data.append(_described(found.opened, None, found.exchanges))
            size += len(found.opened.metadata)
            if size > _LISTED_BYTES:
                break
        return {"object": "list", "data": data, "has_more": len(newest) > len(data)}

    async def get(self, trajectory: str) -> dict[str, Any]:
        """A trajectory as the log has it."""
        try:
            opened, completed, exchanges = await self._registry.describe(trajectory)
        except BrokerError as error:
            raise _no_log(error) from error
        return _described(opened, completed, exchanges)

    def policies(self, access: Access = FULL_ACCESS) -> dict[str, Any]:
        """What the name of each of the key's models stands for now, and what is loaded where."""
        data = []
        for name in self._policies.models:
            if not access.sees(name):
                continue
            version = self._router.current(name)
            held = {v for r in self._fleet.ready() for v in r.loaded if parse_version(v)[0] == name}
            data.append(
                {
                    "model": name,
                    "version": version,
                    "step": parse_version(version)[1],
                    "newest": self._policies.newest(name),
                    "loaded": sorted(held, key=lambda v: parse_version(v)[1]),
                    "refused": {
                        v: why for v, why in self._policies.refused.items() if parse_version(v)[0] == name
                    },
                }
            )
        return {"object": "list", "data": data}

    def models(self, access: Access = FULL_ACCESS) -> dict[str, Any]:
        """OpenAI's list: names that follow the newest version, and exact versions. Of the models that the key is for."""
        names = self._names(access)
        data = [{"id": n, "object": "model", "created": 0, "owned_by": "journeyman"} for n in names]
        return {"object": "list", "data": data}

    def _names(self, access: Access) -> Sequence[str]:
        return [name for name in self._policies.names() if access.sees(self._router.name(name))]

    def model(self, name: str, access: Access = FULL_ACCESS) -> dict[str, Any]:
        """One of them. Raises a 404 `ApiError`, for a model that the key is not for as for one that there is not."""
        known = name in self._policies.models or self._policies.knows(name)
        if not (known and access.sees(self._router.name(name))):
            raise unknown_model(name, self._names(access))
        return {"id": name, "object": "model", "created": 0, "owned_by": "journeyman"}

    def health(self, access: Access | None) -> dict[str, Any]:
        """Always `ok`, as it answers; whether it can have calls answered is said beside it. With `access` also the inference
        servers, which are not everyone's business, and which of the key's versions they have loaded."""
        trouble = self._log_health.trouble
        told = {
            "status": "ok",
            "serving": bool(self._fleet.ready()) and not trouble,
            "log": trouble or "ok",
        }
        if access is None:
            return told
        replicas = [
            {
                "replica": r.name,
                "ready": r.ready,
                "in_flight": r.load,
                "loaded": sorted(v for v in r.loaded if access.sees(self._router.name(v))),
            }
            for r in self._fleet.replicas
        ]
        return {**told, "replicas": replicas}


def _check_path_name(name: str) -> None:
    """Raises `InvalidNameError` for what can't be a name, or can't stand in a URL."""
    check_name(name)
    if name in (".", ".."):
        raise InvalidNameError(name, "in a URL it means another path")


def _described(
    opened: TrajectoryOpened, completed: TrajectoryCompleted | None, exchanges: int
) -> dict[str, Any]:
    return {
        "id": opened.trajectory,
        "object": "trajectory",
        "status": "completed" if completed else "open",
        "project": opened.project,
        "model": opened.model,
        "group": opened.group,
        "task": opened.task,
        "attempt": opened.attempt,
        "split": opened.split,
        "group_size": opened.group_size,
        "pinned": opened.pinned or None,
        "metadata": msgspec.Raw(bytes(opened.metadata)),
        "exchanges": exchanges,
        "opened_at": opened.at,
        "outcome": completed.outcome if completed else None,
        "reward": completed.reward if completed else None,
        "rewards": completed.rewards if completed else {},
        "metrics": completed.metrics if completed else {},
    }


def _no_log(error: BrokerError) -> ApiError:
    return unavailable(f"The log does not answer: {error}", "log_unavailable")
