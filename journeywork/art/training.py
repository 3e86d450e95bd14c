"""One training step of a backend, of groups or of conversations: what goes to the gateway, and the wait until the step
is served.

`journeywork.art.backend` calls `train_groups` and `train_chats`. An ART trajectory holds choices of recorded calls; the
gateway makes a trajectory of its own of these calls (`Member`). Groups that shall be trained together, in one step, are
a *batch*: each of their members names it, with the settings of the step. The trainer takes the step when it has them
all, and `await_step` asks the gateway what became of them."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import anyio

from journeywork.art.captured import NotCapturedError, is_captured, references_of
from journeywork.art.gateway import Batch, Gateway, Member
from journeywork.art.trajectories import Trajectory, TrajectoryGroup
from journeywork.art.types import TrainResult
from journeywork.trajectory import finite_number
from journeywork.transport import GatewayUnavailableError, JourneyworkError, plain_errors

log = logging.getLogger("journeywork.art")

_EQUAL = 1e-6
"""Rewards that differ by no more than this train nothing."""
_CONCURRENT = 8
"""Groups that are sent at the same time."""
_STEP_S = 24 * 3600.0
"""How long the groups of a step may take to be scored and trained."""
_POLL_S = 0.5
"""Time between two looks at the groups that are trained."""
_AUTO_BATCH = 2
"""ART's batch size of supervised fine-tuning, if none is chosen."""
_MAX_UPDATES = 4096


class TrainingError(Exception):
    """The groups were not trained, or the new version can't be served."""


def can_train(group: TrajectoryGroup) -> bool:
    """Return whether a group has something to compare: two trajectories or more, with different rewards."""
    rewards = [trajectory.reward for trajectory in group.trajectories]
    return len(rewards) > 1 and max(rewards) - min(rewards) > _EQUAL


def _member(trajectory: Trajectory, name: str, where: str) -> Member:
    """Return a trajectory as the gateway takes it; its logs, if it has any, replace what `logs` is in its metadata.
    `where` names it in errors. Raises `NotCapturedError`, `TypeError` for a reward or metric that is no number, and
    `ValueError` for one that is not finite."""
    metadata: dict[str, Any] = dict(trajectory.metadata)
    if trajectory.logs:
        metadata["logs"] = list(trajectory.logs)
    return Member(
        id=name,
        exchanges=references_of(trajectory, where),
        reward=finite_number(f"{where}: reward", trajectory.reward),
        metrics={
            metric: finite_number(f"{where}: metrics[{metric!r}]", value)
            for metric, value in trajectory.metrics.items()
        },
        metadata=metadata,
    )


def _members(trajectories: Sequence[Trajectory], group: str, number: int) -> list[Member]:
    """Return the trajectories of a group, which is called `group` and is the `number`-th of its step."""
    return [_member(t, f"{group}-{at}", f"trajectory {at} of group {number}") for at, t in enumerate(trajectories)]


async def complete_groups(
    gateway: Gateway, model: str, groups: dict[str, list[Member]], tasks: dict[str, str], split: str
) -> None:
    """Have the gateway make and complete the trajectories of each group. `groups` and `tasks`: the members and the
    task's description, by the group's name. Raises `TrainingError` if the gateway refuses a group."""
    limiter = anyio.CapacityLimiter(_CONCURRENT)

    async def complete(name: str, members: list[Member]) -> None:
        """Raises a `TrainingError` that says which trajectory the gateway refused, if its answer names one."""
        async with limiter:
            try:
                await gateway.complete_group(name, model, members, task=tasks[name], split=split)
            except GatewayUnavailableError:
                raise
            except JourneyworkError as error:
                where = f"group {name.rpartition('-')[2]}"
                for at, member in enumerate(members):
                    if repr(member["id"]) in str(error):
                        where = f"trajectory {at} of {where}"
                raise TrainingError(f"the gateway refused {where}: {error}") from error

    with plain_errors(Exception):
        async with anyio.create_task_group() as sending:
            for name, members in groups.items():
                sending.start_soon(complete, name, members)


async def train_groups(
    gateway: Gateway, model: str, groups: Sequence[TrajectoryGroup], settings: Mapping[str, Any]
) -> TrainResult:
    """Train one step on `groups`, and return once the new version is served. `settings` of the trainer hold for this
    step, by their names below `trainer`.

    Groups without two different rewards are recorded and not trained. If no other is left, no step is taken. A
    trajectory without a choice is not trained; in a group that is, its reward counts in the baseline.

    Raises `NotCapturedError`, also if no trajectory has a choice, `TypeError` (a reward or metric that is no number)
    and `ValueError` (one that is not finite) before anything is sent, and `TrainingError`, also for a group that the
    gateway refuses, such as for a reward out of its range."""
    batch_id = f"art-{secrets.token_hex(6)}"
    members: dict[str, list[Member]] = {}
    tasks: dict[str, str] = {}
    batch = Batch(id=batch_id, groups=[], settings=dict(settings))
    for number, group in enumerate(groups):
        if not group.trajectories:
            continue
        name = f"{batch_id}-{number}"
        tasks[name] = str(group.metadata.get("scenario_id", ""))
        members[name] = _members(group.trajectories, name, number)
        if can_train(group) and any(member["exchanges"] for member in members[name]):
            batch["groups"].append(name)
        else:  # it is only recorded, which takes calls; in a group that trains, a reward without calls counts too
            members[name] = [member for member in members[name] if member["exchanges"]]
    if members and not any(members.values()):
        raise NotCapturedError(
            "no trajectory holds a `Choice`, so there is nothing to train. Append `completion.choices[0]` to "
            "`messages_and_choices`, not only its message."
        )
    for name in batch["groups"]:
        for member in members[name]:
            member["batch"] = batch
    await complete_groups(gateway, model, {name: runs for name, runs in members.items() if runs}, tasks, "train")
    policy = await gateway.policy(model)
    if not batch["groups"]:
        log.warning("no step was trained: %s", _why_no_group_trains(groups))
        return TrainResult(int(policy["step"]))
    return await await_step(gateway, model, batch["groups"])


def _why_no_group_trains(groups: Sequence[TrajectoryGroup]) -> str:
    if not groups:
        return "there are no groups"
    if not any(group.trajectories for group in groups):
        return f"the {len(groups)} groups hold no trajectories, only exceptions"
    return f"no group has two trajectories with different rewards ({len(groups)} groups were given)"


async def record_groups(gateway: Gateway, model: str, groups: Iterable[TrajectoryGroup]) -> None:
    """Record groups as validation runs. Trajectories with calls that were not recorded are left out."""
    prefix = f"art-{secrets.token_hex(6)}"
    members: dict[str, list[Member]] = {}
    for number, group in enumerate(groups):
        name = f"{prefix}-{number}"
        if captured := [t for t in group.trajectories if is_captured(t)]:
            members[name] = _members(captured, name, number)
    await complete_groups(gateway, model, members, dict.fromkeys(members, ""), "val")


def batches_of(chats: Sequence[Mapping[str, Any]], size: int | Literal["auto"]) -> list[list[Mapping[str, Any]]]:
    """Return the conversations of each optimizer update: `size` of them, in their order."""
    count = _AUTO_BATCH if size == "auto" else size
    return [list(chats[i : i + count]) for i in range(0, len(chats), count)]


async def train_chats(
    gateway: Gateway, model: str, batches: Sequence[Sequence[Mapping[str, Any]]], rates: Sequence[float]
) -> TrainResult:
    """Take one step of an optimizer update per batch of conversations (`messages`, perhaps `tools`), and return once
    the new version is served. `rates`: the learning rate of each update; of more updates, the last one.

    Raises `ValueError` without a conversation or with more than 4,096 updates, and `TrainingError`."""
    if not batches or not all(batches):
        raise ValueError("train_sft: there is no trajectory to train on")
    if len(batches) > _MAX_UPDATES:
        raise ValueError(f"train_sft: {len(batches)} updates in one call; at most {_MAX_UPDATES}, or larger batches")
    batch_id = f"sft-{secrets.token_hex(6)}"
    names = [f"{batch_id}-{number}" for number in range(len(batches))]
    settings = {
        "loss.type": "sft",
        "loss.weighting": "loss",
        "optimizer.epochs": 1,
        "optimizer.minibatches": len(names),
        "optimizer.update_rates": list(rates),
    }
    batch = Batch(id=batch_id, groups=names, settings=settings)

    def member(name: str, chat: Mapping[str, Any]) -> Member:
        return Member(id=name, exchanges=[], demonstration=dict(chat), reward=1.0, metrics={}, metadata={}, batch=batch)

    members = {
        name: [member(f"{name}-{at}", chat) for at, chat in enumerate(chats)]
        for name, chats in zip(names, batches, strict=True)
    }
    await complete_groups(gateway, model, members, dict.fromkeys(names, ""), "train")
    return await await_step(gateway, model, names)


async def await_step(gateway: Gateway, model: str, groups: Sequence[str]) -> TrainResult:
    """Wait until every group was trained or discarded, and until the version that learned from them is served. Return
    that version with the metrics of its step; the served step alone if all groups were discarded. Raises
    `TrainingError` if a group is a dead letter, the version can't be served, or `_STEP_S` is over."""
    waiting = set(groups)
    trained: dict[str, Any] = {}
    reasons: list[str] = []

    async def result_if_served() -> TrainResult | None:
        """Ask about the groups that are not decided yet, then about the version. Return `None` while it has to be
        waited for."""
        for name in sorted(waiting):
            state = await gateway.group(name, model)
            if state["status"] == "waiting":
                continue
            waiting.discard(name)
            if state["status"] == "trained":
                trained.update(state)
            elif state["status"] == "dead":
                raise TrainingError(
                    f"group {name} could not be scored or trained: {state['reason']}: {state['detail']}. The groups "
                    "are dead letters now (`journeywork dead`)"
                )
            else:
                reasons.append(f"{state['reason']}: {state['detail']}")
        if waiting:
            return None
        policy = await gateway.policy(model)
        if not trained:
            log.warning("no step was trained, because every group was discarded: %s", "; ".join(reasons))
            return TrainResult(int(policy["step"]))
        version = str(trained["version"])
        if version in policy["refused"]:
            raise TrainingError(f"{version} was trained and can't be served: {policy['refused'][version]}")
        step = int(version.rpartition("@")[2])
        if int(policy["step"]) < step:
            # A name that a decision keeps at an older version stays there.
            decided = bool(policy["decision"] and policy["decision"]["version"])
            if not (decided and version in policy["loaded"]):
                return None
        return TrainResult(step, trained.get("metrics", {}), version)

    with anyio.move_on_after(_STEP_S):
        while True:
            try:
                if result := await result_if_served():
                    return result
            except GatewayUnavailableError as error:
                log.info("still waiting for %s: %s", gateway.url, error)
            except JourneyworkError as error:
                raise TrainingError(f"whether the groups were trained is not known: {error}") from error
            await anyio.sleep(_POLL_S)
    raise TrainingError(f"{len(waiting)} groups were neither trained nor discarded within {_STEP_S / 3600:g} hours")
