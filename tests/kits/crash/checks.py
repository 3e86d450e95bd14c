"""What must hold after the deaths: the log, the files and the agents agree."""

from __future__ import annotations

import json
from collections import Counter

import anyio
import pytest

from pipeline import events, streams
from pipeline.config import Config
from pipeline.log.broker import Broker
from pipeline.security import signing
from store.lake.lake import lake_in
from store.reading import sql
from tests.kits.crash.agents import GROUP, TURNS, Agents
from tests.kits.log import read_stream
from tests.kits.upstream import Upstream
from tests.store.kit import stored_events

GARBAGE = b"\xc1"
"""The payload of messages that are no events."""


async def settled(broker: Broker) -> None:
    """Until every event is acknowledged, but for groups that are too few for a step, and the newest version is
    served."""
    while True:
        loaded = {r.event.step for r in await broker.read(events.PolicyLoaded)}
        groups = await read_stream(broker, "GROUPS")
        done = {r.event.group for r in groups if isinstance(r.event, events.GroupDiscarded)}
        steps = await checkpoints(broker)
        done |= {g for c in steps for g in c.groups}
        scored = {r.event.group for r in groups if isinstance(r.event, events.GroupScored)}
        waiting = await broker.lag("store-") + await broker.lag("judge")
        if not waiting and len(scored - done) < 2 and {c.step for c in steps[-1:]} <= loaded:
            return
        await anyio.sleep(0.2)


async def checkpoints(broker: Broker) -> list[events.CheckpointPublished]:
    history = await broker.read(events.CheckpointPublished)
    return [r.event for r in history]


async def in_log(broker: Broker) -> dict[tuple[str, int], bytes]:
    """(stream, sequence) and payload of every message that is an event."""
    found: dict[tuple[str, int], bytes] = {}
    for spec in streams.STREAMS:
        info = await broker.stream_info(spec.name)
        async for message in broker.messages(spec.name, 1, info.state.last_seq):
            if message.payload != GARBAGE:
                events.decode(message.payload)
                found[spec.name, message.seq] = message.payload
    return found


async def check(broker: Broker, config: Config, agents: Agents, upstream: Upstream, least: tuple[int, int]) -> None:
    """Check that log and files agree with each other and with what the agents received."""
    log = await in_log(broker)
    found = stored_events(lake_in(config.path("store")))
    assert {k: n for k, n in found.items() if n != 1} == {}
    ends = {spec.name: (await broker.stream_info(spec.name)).state.last_seq for spec in streams.STREAMS}
    assert set(found) == set(log), f"the log's streams end at {ends}"
    history = [await broker.decode(payload) for payload in log.values()]

    # What agents were answered is on the log, once, with the tokens that were sampled.
    exchanges = [e for e in history if isinstance(e, events.ExchangeRecorded)]
    assert Counter((e.trajectory, e.seq) for e in exchanges) == Counter(agents.replies.keys())
    for e in exchanges:
        reply = agents.replies[e.trajectory, e.seq]
        assert json.loads(e.response)["id"] == reply
        assert events.unpack_ids(e.sampled_ids).tolist() == upstream.said[reply]
    completed = Counter(e.trajectory for e in history if isinstance(e, events.TrajectoryCompleted))
    assert completed == Counter(agents.finished.keys())
    assert len(agents.finished) > least[0]

    # Each signal is on the log once, and has its effect on a run that did not stop waiting for it.
    signals = [e for e in history if isinstance(e, events.SignalGiven)]
    assert Counter((e.trajectory, e.call, e.value) for e in signals) == Counter(
        (run, call, value) for (run, call), value in agents.signals.items()
    )
    overdue = {e.group for e in history if isinstance(e, events.FeedbackTimedOut)}
    for e in (e for e in history if isinstance(e, events.GroupScored) and e.group not in overdue):
        for m in e.members:
            assert m.reward == pytest.approx((agents.finished[m.trajectory] + agents.signals[m.trajectory, -1]) / 2)

    # Each group is scored once with all its members; it is trained once, discarded once, or waits for another.
    scored = [e for e in history if isinstance(e, events.GroupScored)]
    assert Counter(m.trajectory for e in scored for m in e.members) == completed
    assert Counter(e.group for e in scored) == Counter({t.rpartition("-")[0] for t in agents.finished})
    steps = sorted((e for e in history if isinstance(e, events.CheckpointPublished)), key=lambda e: e.step)
    assert [e.step for e in steps] == list(range(1, len(steps) + 1)), "a step is missing or doubled"
    assert [e.parent for e in steps] == [f"tiny@{i}" for i in range(len(steps))]
    ends = Counter(g for e in steps for g in e.groups)
    ends.update(e.group for e in history if isinstance(e, events.GroupDiscarded))
    assert set(ends.values()) == {1}, "a group trained twice, or trained and discarded"
    assert len({e.group for e in scored} - set(ends)) < 2
    assert len(steps) > least[1]
    trust = signing.Trust(config.signing)
    assert trust.is_enforced
    assert [objection for e in steps if (objection := trust.objection(e))] == []
    assert {e.reason for e in history if isinstance(e, events.DeadLettered)} <= {"undecodable"}

    # The newest version is served, and its delivery is on the log.
    assert f"tiny@{len(steps)}" in upstream.adapters
    assert any(isinstance(e, events.PolicyLoaded) and e.step == len(steps) for e in history)

    # SQL says the same.
    with sql.connect(config) as connection:
        counted = connection.sql("SELECT count(*), count(DISTINCT trajectory) FROM trajectories").fetchall()
        assert counted == [(len(agents.finished), len(agents.finished))]
        trained = connection.sql("SELECT count(*), count(DISTINCT group_id) FROM lineage").fetchall()
        groups = sum(len(e.groups) for e in steps)
        assert trained == [(groups * GROUP * TURNS, groups)]
