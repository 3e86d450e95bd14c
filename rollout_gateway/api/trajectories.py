"""Opening, completing and reading trajectories; `groups` completes several by the same checks. All handlers raise
`ApiError`."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec

from pipeline.config import ConfigError, with_batch_settings
from pipeline.events import TrajectoryOpened
from pipeline.names import InvalidNameError, check_name, new_dated_id, parse_version
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.gateway import ControlRequest, Gateway
from rollout_gateway.api.schemas import Opening
from rollout_gateway.capture.registry import Completion
from rollout_gateway.http.errors import ApiError, check_group_size, retired_version
from rollout_gateway.http.request import Headers

_NAMES_BYTES = 16 * 1024
"""Limit on the names of a run's rewards and metrics, in bytes: the event of its group has those of up to 1,024 runs."""

# -- opening -------------------------------------------------------------------------------------------------------


async def open_trajectory(request: ControlRequest) -> dict[str, Any]:
    """Open a trajectory, which belongs to the caller's key. With an `id`, the request may be repeated."""
    gateway, access, opening = request.gateway, request.access, request.read(Opening)
    access.check_model(gateway.router.name(opening.model))
    _check_model(gateway, opening, access)
    check_group_size("group_size", opening.group_size, gateway.config.gateway.max_group_size)
    trajectory = opening.id or new_dated_id("t")
    group = opening.group or trajectory
    for name in (trajectory, group):
        check_name(name)
    fields = msgspec.structs.asdict(opening)
    del fields["id"]
    fields |= {"group": group, "metadata": msgspec.json.encode(opening.metadata)}
    event = TrajectoryOpened(project=gateway.project, trajectory=trajectory, owner=access.owner, **fields)
    await gateway.registry.open(event, traceparent(request.http.headers), access, named=bool(opening.id))
    return {
        "id": trajectory,
        "model": opening.model,
        "group": group,
        "api_key": gateway.registry.tokens.issue(trajectory),
        "base_url": f"{gateway.origins.base_url(request.http)}/t/{quote(trajectory, safe='')}/v1",
    }


def _check_model(gateway: Gateway, opening: Opening, access: Access) -> None:
    """Raise a 404 `ApiError` if `model` is not a model's name, or `pinned` not a version of it that can be served."""
    model, pinned, policies = opening.model, opening.pinned, gateway.policies
    if model not in gateway.router.outside and policies.state(model) is None:
        name = gateway.router.name(model)
        if policies.state(name) is None:
            raise gateway.unknown_model(model, access)
        message = f"{model!r} is a version, not a model. Open with the model {name!r} and `pinned`: {model!r}."
        raise ApiError(404, "model_not_found", message, param="model")
    if not pinned:
        return
    if policies.knows(pinned) and pinned in policies.retired:
        raise retired_version(pinned, policies.versions(model), "pinned")
    if not policies.knows(pinned) or parse_version(pinned)[0] != model:
        message = f"{pinned!r} is not a version that can be pinned. There are: {', '.join(policies.versions(model))}."
        raise ApiError(404, "model_not_found", message, param="pinned")


# -- completing ----------------------------------------------------------------------------------------------------


async def complete(request: ControlRequest) -> dict[str, Any]:
    """Complete a trajectory. The same request again gets the same answer."""
    gateway, (trajectory,), completion = request.gateway, request.values, request.read(Completion)
    request.charge_runs(count_runs(completion))
    await check_completion(gateway, completion, request.access)
    opened = (await gateway.registry.find_to_read(trajectory)).opened
    check_batch(gateway, completion, request.access, opened.model, opened.group)
    return await complete_after_checks(gateway, trajectory, completion)


async def complete_after_checks(gateway: Gateway, trajectory: str, completion: Completion) -> dict[str, Any]:
    """Complete a trajectory whose results were checked. Returns the answer to the request."""
    event = await gateway.registry.complete(trajectory, completion)
    names = ("outcome", "reward", "exchanges", "calls", "prompt_tokens", "sampled_tokens", "calls_s")
    return {"id": trajectory, **{name: getattr(event, name) for name in names}}


def count_runs(completion: Completion) -> int:
    """Return the number of runs that a completion makes the gateway read, as its key pays for each: those whose calls
    `exchanges` names, else 1 for the run itself."""
    return len({reference.trajectory for reference in completion.exchanges}) or 1


async def check_completion(gateway: Gateway, completion: Completion, access: Access) -> None:
    """Check the results of a run. Raises an `ApiError`. 400: a reward is out of range, or a reward or metric has a name
    that tables and labels can't hold. 403: a trajectory's own key sets `exchanges` or `batch`. 404: `exchanges` name a
    trajectory of another key."""
    _check_rewards(completion, gateway.config.gateway.max_reward)
    for field, numbers in (("rewards", completion.rewards), ("metrics", completion.metrics)):
        for name in numbers:
            try:
                check_name(name)
            except InvalidNameError as error:
                raise ApiError(400, "invalid_name", f"In `{field}`: {error}.", param=field) from error
    if (size := len("".join((*completion.rewards, *completion.metrics)).encode())) > _NAMES_BYTES:
        message = f"The names in `rewards` and `metrics` have {size:,} bytes: {_NAMES_BYTES:,} are allowed together."
        raise ApiError(400, "invalid_name", message, param="metrics")
    batch = completion.batch
    if access.trajectory and (completion.exchanges or batch is not None):
        message = "A trajectory's key can't set `exchanges` or `batch`. Use the opener's key."
        raise ApiError(403, "wrong_role", message)
    if batch is not None:
        for name in (batch.id, *batch.groups):
            check_name(name)
    for trajectory in {reference.trajectory for reference in completion.exchanges}:
        await gateway.registry.opening_for(trajectory, access)


def _check_rewards(completion: Completion, limit: float) -> None:
    """Raise a 400 `ApiError` if a reward, or the sum of the named ones where there is no `reward`, exceeds `limit`."""
    rewards = {f"rewards.{name}": value for name, value in completion.rewards.items()}
    if completion.reward is not None:
        rewards["reward"] = completion.reward
    else:  # the judge adds the named ones up
        rewards["rewards"] = sum(completion.rewards.values())
    for name, value in rewards.items():
        if not abs(value) <= limit:
            what = "the sum of `rewards`" if name == "rewards" else f"`{name}`"
            message = f"The value of {what} is {value:g}. It must be from -{limit:g} to {limit:g} (gateway.max_reward)."
            raise ApiError(400, "reward_out_of_range", message, param=name)


def check_batch(gateway: Gateway, completion: Completion, access: Access, model: str, group: str) -> None:
    """Check the batch of a completed trajectory of `model` in `group`. Raises an `ApiError`. 400: it does not name the
    group, or has `settings` that the installation does not permit or the model's trainer can't use. 403: it has
    `settings` without an operator's key."""
    batch = completion.batch
    if batch is None:
        return
    if group not in batch.groups:
        message = f"`batch.groups` does not name {group!r}, the group of the trajectory. Name it, or leave `batch` out."
        raise ApiError(400, "wrong_group", message, param="batch")
    if not batch.settings:
        return
    if not access.operator:
        message = "A batch's `settings` need an operator's key: they decide what the model becomes."
        raise ApiError(403, "wrong_role", message, param="batch")
    config = gateway.config
    try:
        with_batch_settings(config.trainer_of(config.model(model)), batch.settings)
    except ConfigError as error:
        raise ApiError(400, "invalid_settings", f"{error}.", param="batch") from error


# -- reading -------------------------------------------------------------------------------------------------------


async def get_trajectory(request: ControlRequest) -> dict[str, Any]:
    """`GET /v1/trajectories/{trajectory}`: how a trajectory was opened, and its results if it is completed."""
    opened, completed, exchanges = await request.gateway.registry.describe(*request.values)
    if not request.access.sees(opened.model):  # an apprentice, of which the key is told nothing
        opened = opened.as_asked()
    names = ("project", "model", "group", "task", "attempt", "split", "group_size")
    results: dict[str, Any] = {"outcome": None, "reward": None, "rewards": {}, "metrics": {}}
    if completed is not None:
        results = {name: getattr(completed, name) for name in results}
    return {
        "id": opened.trajectory,
        "status": "completed" if completed else "open",
        **{name: getattr(opened, name) for name in names},
        "pinned": opened.pinned or None,
        "metadata": msgspec.json.decode((completed or opened).metadata or b"{}"),
        "exchanges": exchanges,
        "opened_at": opened.at,
        **results,
    }


def traceparent(headers: Headers) -> str:
    """Return the W3C trace context of a request; empty if it has none, or one that is not 55 characters of ASCII."""
    value = headers.get(b"traceparent", b"").decode("latin-1")
    return value if len(value) == 55 and value.isascii() else ""
