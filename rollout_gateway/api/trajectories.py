"""Opening, completing and reading trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

import msgspec

from pipeline.config import ConfigError, GatewayConfig, TrainerConfig, with_batch_settings
from pipeline.events import TrajectoryCompleted, TrajectoryOpened
from pipeline.names import InvalidNameError, check_name, new_dated_id, parse_version
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.control_request import ControlRequest
from rollout_gateway.api.schemas import (
    Completed,
    Opened,
    Opening,
    TrajectoryState,
)
from rollout_gateway.capture.registry import BatchRequest, Completion, Registry
from rollout_gateway.http.errors import ApiError, unknown_model, unknown_trajectory
from rollout_gateway.http.origins import OriginPolicy
from rollout_gateway.http.request import Headers
from rollout_gateway.serving.pacing import Pacing
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.routing import VersionRouter


@dataclass(eq=False)
class TrajectoryRoutes:
    """Handlers of the routes about trajectories. All raise `ApiError`."""

    _project: str
    _config: GatewayConfig
    _trainer: TrainerConfig
    _policies: Policies
    _registry: Registry
    _router: VersionRouter
    _pacing: Pacing
    _origins: OriginPolicy

    # -- opening ---------------------------------------------------------------------------------------------------

    async def open(self, request: ControlRequest) -> Opened:
        """Open a trajectory, which belongs to the caller's key. With an `id`, the request may be repeated."""
        opening, access = request.read(Opening), request.access
        access.check_model(self._router.name(opening.model))
        self._check_model(opening, access)
        trajectory = opening.id or new_dated_id("t")
        group = opening.group or trajectory
        for name in (trajectory, group):
            check_name(name)
            if name in (".", ".."):
                raise InvalidNameError(name, "in a URL it means another path")
        paced_s = await self._pacing.admit(opening.model, group, opening.split, access.owner)
        token = self._registry.tokens.issue(trajectory)
        event = TrajectoryOpened(
            project=self._project,
            trajectory=trajectory,
            model=opening.model,
            group=group,
            task=opening.task,
            attempt=opening.attempt,
            split=opening.split,
            group_size=opening.group_size,
            pinned=opening.pinned,
            metadata=msgspec.json.encode(opening.metadata),
            paced_s=paced_s,
            owner=access.owner,
            key_completes=opening.key_completes,
            references=opening.references,
        )
        await self._registry.open(event, traceparent(request.http.headers), access)
        base_url = f"{self._origins.base_url(request.http)}/t/{quote(trajectory, safe='')}/v1"
        return Opened(id=trajectory, model=opening.model, group=group, api_key=token, base_url=base_url)

    def _check_model(self, opening: Opening, access: Access) -> None:
        """Raises a 404 `ApiError` if `model` is not a model's name, or `pinned` not one of its versions."""
        model, pinned = opening.model, opening.pinned
        if model not in self._policies.models:
            name = self._router.name(model)
            if name not in self._policies.models:
                raise unknown_model(model, [name for name in self._policies.models if access.sees(name)])
            message = (
                f"{model!r} is a version, not a model. Open with the model {name!r} and `pinned`: {model!r}."
            )
            raise ApiError(404, "model_not_found", message, param="model")
        if pinned and (not self._policies.offered(pinned) or parse_version(pinned)[0] != model):
            versions = [name for name in self._policies.names(model) if name != model]
            message = f"{pinned!r} is not a version that can be pinned. There are: {', '.join(versions)}."
            raise ApiError(404, "model_not_found", message, param="pinned")

    # -- completing ------------------------------------------------------------------------------------------------

    async def complete(self, request: ControlRequest) -> Completed:
        """Complete a trajectory. The same request again gets the same answer."""
        completion = request.read(Completion)
        await self.check(completion, request.access)
        opened = await self._registry.opening(request.values[0])
        if opened is not None:
            check_batch(completion, opened.group)
        return await self.complete_as(request.values[0], completion)

    async def complete_as(self, trajectory: str, completion: Completion) -> Completed:
        """Complete a trajectory whose results were checked."""
        event = await self._registry.complete(trajectory, completion)
        return Completed(
            id=trajectory,
            outcome=event.outcome,
            reward=event.reward,
            exchanges=event.exchanges,
            calls=event.calls,
            prompt_tokens=event.prompt_tokens,
            sampled_tokens=event.sampled_tokens,
            calls_s=event.calls_s,
        )

    async def check(self, completion: Completion, access: Access) -> None:
        """Raises an `ApiError`: 400 for a reward out of range, or the name of a reward or metric that can't be shown,
        403 if the caller may not form trajectories and batches, 404 for calls of trajectories that it may not see."""
        self._check_rewards(completion)
        for field, numbers in (("rewards", completion.rewards), ("metrics", completion.metrics)):
            for name in numbers:
                _check_measure(field, name)
        batch = completion.batch
        if access.trajectory and (completion.exchanges or batch is not None):
            message = "A trajectory's key can't set `exchanges` or `batch`. Use the opener's key."
            raise ApiError(403, "wrong_role", message)
        if batch is not None:
            for name in (batch.id, *batch.groups):
                check_name(name)
            self._check_settings(batch, access)
        for trajectory in {reference.trajectory for reference in completion.exchanges}:
            opened = await self._registry.opening(trajectory)
            if opened is None or not access.owns(opened.owner):
                raise unknown_trajectory(trajectory)

    def _check_settings(self, batch: BatchRequest, access: Access) -> None:
        if not batch.settings:
            return
        if not access.operator:
            message = "A batch's `settings` need an operator's key: they decide what the model becomes."
            raise ApiError(403, "wrong_role", message, param="batch")
        try:
            with_batch_settings(self._trainer, batch.settings)
        except ConfigError as error:
            raise ApiError(400, "invalid_settings", f"{error}.", param="batch") from error

    def _check_rewards(self, completion: Completion) -> None:
        rewards = {f"rewards.{name}": value for name, value in completion.rewards.items()}
        if completion.reward is not None:
            rewards["reward"] = completion.reward
        # Without `reward`, the judge adds the named ones up.
        rewards["rewards"] = sum(completion.rewards.values())
        limit = self._config.max_reward
        for name, value in rewards.items():
            if not abs(value) <= limit:
                what = "the sum of `rewards`" if name == "rewards" else f"`{name}`"
                message = (
                    f"The value of {what} is {value:g}. It must be from -{limit:g} to {limit:g} "
                    "(gateway.max_reward)."
                )
                raise ApiError(400, "reward_out_of_range", message, param=name)

    # -- reading ---------------------------------------------------------------------------------------------------

    async def get(self, request: ControlRequest) -> TrajectoryState:
        """Answer with a trajectory as recorded on the log."""
        return _state(*await self._registry.describe(request.values[0]))


def check_batch(completion: Completion, group: str) -> None:
    """Raise a 400 `ApiError` for a batch that does not name the trajectory's own group."""
    batch = completion.batch
    if batch is not None and group not in batch.groups:
        message = f"`batch.groups` does not name {group!r}, the group of the trajectory. Name it, or leave `batch` out."
        raise ApiError(400, "wrong_group", message, param="batch")


def _check_measure(field: str, name: str) -> None:
    """Raise a 400 `ApiError` for the name of a reward or metric that would spoil tables and labels."""
    try:
        check_name(name)
    except InvalidNameError as error:
        raise ApiError(400, "invalid_name", f"In `{field}`: {error}.", param=field) from error


def traceparent(headers: Headers) -> str:
    """The W3C trace context of a request; empty if it has none."""
    value = headers.get(b"traceparent", b"").decode("latin-1")
    return value if len(value) == 55 and value.isascii() else ""


def _state(
    opened: TrajectoryOpened, completed: TrajectoryCompleted | None, exchanges: int
) -> TrajectoryState:
    state = TrajectoryState(
        id=opened.trajectory,
        status="completed" if completed else "open",
        project=opened.project,
        model=opened.model,
        group=opened.group,
        task=opened.task,
        attempt=opened.attempt,
        split=opened.split,
        group_size=opened.group_size,
        pinned=opened.pinned or None,
        metadata=msgspec.Raw(bytes(opened.metadata)),
        exchanges=exchanges,
        opened_at=opened.at,
    )
    if completed is not None:
        state.outcome, state.reward = completed.outcome, completed.reward
        state.rewards, state.metrics = completed.rewards, completed.metrics
    return state
