"""Groups are read from replicas that may lag, and decided by what the log's leader holds."""

import pytest

from judge.group_log import GroupEnd, GroupLog
from judge.groups import GroupKey
from judge.scoring import late_event
from pipeline.config import JudgeConfig
from pipeline.events import GroupAdmitted, GroupDiscarded, GroupScored, Member
from pipeline.log.broker import Broker
from pipeline.log.messages import Place
from tests.judge.kit import completed
from tests.pipeline.log.test_history import Lagging

KEY = GroupKey("p", "m", "g", "train")
SETTINGS = JudgeConfig(group_size=3)


async def test_a_read_that_lacks_the_arrival_is_repeated(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        await broker.publish(completed(name))
    lagging = Lagging(broker, 1, gets=1)
    monkeypatch.setattr(broker, "_direct_get", lagging)
    log = GroupLog(broker, SETTINGS)
    found = await log.read(KEY, Place(2, 0))
    assert found is not None
    assert (lagging.asked, found.closed_at, len(found.group.members)) == (2, 0, 2)
    found = await log.read(KEY, Place(3, 0))
    assert found is not None
    assert (lagging.asked, found.closed_at) == (3, 3)


async def test_a_message_that_left_the_log_has_no_group(broker: Broker) -> None:
    for name in "ab":
        await broker.publish(completed(name))
    await broker.delete("ROLLOUTS", 2)
    log = GroupLog(broker, SETTINGS)
    assert await log.read(KEY, Place(2, 0)) is None
    assert await log.read(KEY, Place(1, 7)) is None  # after a power cut: another message has the sequence
    assert await log.read(KEY, Place(1, 0)) is not None


async def test_a_group_ends_by_its_score_or_its_discard_and_by_nothing_else(broker: Broker) -> None:
    log = GroupLog(broker, SETTINGS)
    assert await log.read_end(KEY) == GroupEnd()
    fields = {"project": "p", "model": "m", "group": "g"}
    await broker.publish(GroupAdmitted(**fields))
    await broker.publish(late_event(completed("d")))
    await broker.publish(late_event(completed("v", split="val")))
    members = (Member(trajectory="a", reward=1.0),)
    scored = {**fields, "judge": "j", "members": members}
    await broker.publish(GroupScored(**scored, branch="b"))
    await broker.publish(GroupDiscarded(**fields, trajectories=("a",), reason="no_variance", by="trainer"))
    assert await log.read_end(KEY) == GroupEnd(ended=False, trajectories=frozenset("d"))
    await broker.publish(GroupScored(**scored))
    assert await log.read_end(KEY) == GroupEnd(ended=True, trajectories=frozenset("ad"), scored=True)
    other = GroupKey("p", "m", "h", "train")
    await broker.publish(
        GroupDiscarded(project="p", model="m", group="h", trajectories=("x",), reason="unscored", by="judge")
    )
    assert await log.read_end(other) == GroupEnd(ended=True, trajectories=frozenset("x"))
