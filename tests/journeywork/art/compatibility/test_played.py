"""Trajectories, groups, and what plays many of them."""

import asyncio
import copy
from typing import Any

import pytest

from .kit import CALL, TOOL, art, failed, gathered, played, rewards, said, user


def test_messages_are_those_of_dictionaries_and_choices_and_their_tool_calls() -> None:
    made = art.Trajectory(
        messages_and_choices=[user("u"), said("hi"), user("v"), said(None, tool_calls=[CALL])], tools=[TOOL]
    )
    *spoken, message = made.messages()
    assert spoken == [user("u"), {"role": "assistant", "content": "hi"}, user("v")]
    assert (message["role"], message["content"]) == ("assistant", "")
    (call,) = message["tool_calls"]
    assert (call["id"], call["type"], call["function"]) == ("c1", "function", CALL["function"])
    assert made.tools == [TOOL]


def test_a_trajectory_is_logged_and_read_from_json() -> None:
    made = art.Trajectory(
        messages_and_choices=[user("u"), said("x")], reward=0.5, metrics={"a": 2}, metadata={"b": None}, logs=["l"]
    )
    shown = made.for_logging()
    assert [(m["role"], m["trainable"]) for m in shown["messages"]] == [("user", False), ("assistant", True)]
    assert (shown["reward"], shown["metadata"], shown["logs"]) == (0.5, {"b": None}, ["l"])
    made.messages_and_choices.pop()
    again = art.Trajectory.model_validate_json(made.model_dump_json())
    assert (again.messages(), again.reward, again.metrics, again.metadata) == ([user("u")], 0.5, {"a": 2}, {"b": None})


def test_a_group_holds_trajectories_and_keeps_exceptions_as_values() -> None:
    one, other = art.Trajectory(reward=1), art.Trajectory(reward=2)
    group = art.TrajectoryGroup(item for item in (one, ValueError("no"), other))
    assert (len(group), list(group)) == (2, [one, other])
    assert (group.metadata, group.metrics, group.logs) == ({}, {}, [])
    group = art.TrajectoryGroup(
        [*group.trajectories, ValueError("no")],
        exceptions=[KeyError("k")],
        metadata={"a": "b"},
        metrics={"c": 1},
        logs=["d"],
    )
    assert (group.metadata, group.metrics, group.logs) == ({"a": "b"}, {"c": 1}, ["d"])
    assert ["ValueError" in e.type for e in group.exceptions] == [True, False]
    assert group.exceptions[0].message == "no"
    assert "ValueError: no" in group.exceptions[0].traceback


def test_an_awaited_group_plays_its_coroutines_at_the_same_time_and_raises_what_they_raise() -> None:
    inside = most = 0

    async def one() -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.02)
        inside -= 1
        return art.Trajectory()

    async def run(*more: Any) -> Any:
        return await art.TrajectoryGroup([*(one() for _ in range(5)), *more], metadata={"a": 1})

    group = asyncio.run(run())
    assert isinstance(group, art.TrajectoryGroup)
    assert (most, len(group), group.metadata) == (5, 5, {"a": 1})
    with pytest.raises(RuntimeError, match="boom"):
        asyncio.run(run(failed()))


@pytest.mark.parametrize(
    ("allowed", "good", "bad", "raised"),
    [
        (1, 2, 1, False),
        (1, 2, 2, True),
        (2, 2, 2, False),
        (0.5, 2, 2, False),
        (0.5, 1, 3, True),
        (0.25, 3, 1, False),
        (0.1, 2, 1, True),
        (100, 0, 3, False),
        (0, 1, 1, True),
    ],
)
def test_so_many_exceptions_are_kept(allowed: float, good: int, bad: int, raised: bool) -> None:
    def groups() -> list[Any]:
        return [art.TrajectoryGroup([*(played(1) for _ in range(good)), *(failed(f"no {n}") for n in range(bad))])]

    if raised:
        with pytest.raises(RuntimeError, match="no"):
            gathered(groups, max_exceptions=allowed)
        return
    (group,) = gathered(groups, max_exceptions=allowed)
    assert (len(group), len(group.exceptions)) == (good, bad)
    assert {e.message for e in group.exceptions} == {f"no {n}" for n in range(bad)}
    if allowed >= 1:  # they are counted over all groups
        assert len(gathered(lambda: groups() + groups(), max_exceptions=2 * bad)) == 2
        with pytest.raises(RuntimeError, match="no"):
            gathered(lambda: groups() + groups(), max_exceptions=2 * bad - 1)


def test_after_each_may_change_leave_out_and_multiply_groups() -> None:
    async def after(group: Any) -> Any:
        (reward,) = rewards(group)
        if reward == 9:
            raise ValueError("after")
        group.trajectories[0].reward += 10
        return {0: None, 1: group}.get(reward, [group, copy.deepcopy(group)])

    groups = gathered(lambda: [art.TrajectoryGroup([played(n)]) for n in range(3)], after_each=after)
    assert [rewards(group) for group in groups] == [[11], [12], [12]]
    with pytest.raises(ValueError, match="after"):
        gathered(lambda: [art.TrajectoryGroup([played(9)])], after_each=after, max_exceptions=5)


def test_an_awaitable_group_may_fail_itself() -> None:
    async def broken() -> Any:
        raise KeyError("group")

    def groups() -> list[Any]:
        return [broken(), art.TrajectoryGroup([played(2)])]

    assert [rewards(group) for group in gathered(groups, max_exceptions=1)] == [[2]]
    with pytest.raises(KeyError):
        gathered(groups)


def test_trajectories_several_of_one_awaitable_and_exceptions_come_in_their_order() -> None:
    async def both() -> Any:
        return [await played(2), await played(3)]

    async def run(allowed: float) -> Any:
        playing = [played(1, 0.03), failed(), both(), played(4)]
        return await art.gather_trajectories(playing, pbar_desc="play", max_exceptions=allowed)

    one, error, pair, other = asyncio.run(run(1))
    assert (one.reward, type(error), [t.reward for t in pair], other.reward) == (1, RuntimeError, [2, 3], 4)
    with pytest.raises(RuntimeError):
        asyncio.run(run(0))
