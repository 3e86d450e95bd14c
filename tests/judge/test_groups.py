"""What the log says of a group, message by message."""

from typing import Any

import pytest

from judge.groups import GroupKey, GroupOnLog, key_of, read_group
from pipeline.events import AnyEvent, GroupTimedOut
from pipeline.log.broker import LogEntry
from pipeline.log.messages import Place
from tests.judge.kit import completed

KEY = GroupKey("p", "m", "g", "train")
TIMEOUT = GroupTimedOut(project="p", model="m", group="g")


def read(*events: AnyEvent, key: GroupKey = KEY, **how: Any) -> GroupOnLog:
    """The group of `events`, which have the sequences 1, 2, …; of 3 runs, unless they say otherwise."""
    messages = [LogEntry[AnyEvent](e, "ROLLOUTS", Place(seq, 0), e.subject()) for seq, e in enumerate(events, 1)]
    return read_group(key, messages, 3, **how)


def names(found: GroupOnLog) -> tuple[list[str], list[str]]:
    """Its members, and what is late."""
    return [a.event.trajectory for a in found.group.members], [a.event.trajectory for a in found.late.values()]


@pytest.mark.parametrize(
    ("events", "members", "late", "closed_at", "closed_by"),
    [
        ([], "", "", 0, "size"),
        (["a", "b"], "ab", "", 0, "size"),
        (["a", "b", "c"], "abc", "", 3, "size"),
        (["a", "b", "c", "d"], "abc", "d", 3, "size"),
        (["a", "b", TIMEOUT], "ab", "", 3, "timeout"),
        (["a", TIMEOUT, "b"], "a", "b", 2, "timeout"),
        (["a", TIMEOUT, "b", "c", "d"], "a", "bcd", 2, "timeout"),
        (["a", "b", "c", TIMEOUT, "d"], "abc", "d", 3, "size"),
        ([TIMEOUT, "a"], "", "a", 1, "timeout"),
        (["a", "b", "a", "c"], "abc", "", 4, "size"),  # a dead letter that was delivered again
        (["a", "b", "c", "a"], "abc", "", 3, "size"),
    ],
)
def test_the_order_of_the_log_decides(
    events: list[Any], members: str, late: str, closed_at: int, closed_by: str
) -> None:
    found = read(*(completed(e) if isinstance(e, str) else e for e in events))
    assert names(found) == (list(members), list(late))
    assert (found.closed_at, found.group.closed_by) == (closed_at, closed_by)
    assert found.first == (1 if members else 0)
    assert all(found.late[seq].seq == seq > closed_at for seq in found.late)


@pytest.mark.parametrize(("group", "size", "closed"), [("", 0, True), ("a", 0, True), ("a", 2, False), ("g", 0, False)])
def test_a_run_that_names_no_group_is_one_of_its_own(group: str, size: int, closed: bool) -> None:
    """The gateway gives a run that was opened without a group the run's own id as the name of its group."""
    event = completed("a", group, group_size=size)
    assert bool(read(event, key=key_of(event)).closed_at) == closed


def test_the_largest_announced_size_counts_as_soon_as_it_is_announced() -> None:
    events = [completed("a", group_size=2), completed("b", group_size=4), completed("c"), completed("d")]
    assert read(*events[:1], completed("b")).closed_at == 2
    assert read(*events[:3]).closed_at == 0
    assert read(*events).closed_at == 4


def test_messages_of_other_groups_are_skipped() -> None:
    val = completed("v", split="val")
    assert names(read(val, completed("a"), GroupTimedOut(project="p", model="m", group="g", split="val")))[0] == ["a"]
    assert read(val, key=key_of(val)).group.trajectories == frozenset("v")
