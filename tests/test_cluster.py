"""Three NATS servers, streams with three copies: contention, replicas that lag, and nodes that are killed."""

import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import pytest

from judge.service import Judge
from pipeline import streams
from pipeline.config import Config, JudgeConfig, NatsConfig
from pipeline.events import CheckpointPublished, Event, ExchangeRecorded, GroupDiscarded, GroupScored
from pipeline.log import health
from pipeline.log.broker import Broker
from pipeline.log.follow import follow_events
from pipeline.log.subjects import keys_of
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.registry import Registry
from tests.judge.kit import expected_groups
from tests.kits.crash.agents import SEED
from tests.kits.crash.fork_server import ACK_WAIT_S
from tests.kits.crash.matrix import run_matrix, server_users, settings, violations
from tests.kits.events import checkpoint, completed, exchange, opened
from tests.kits.log import read_stream
from tests.kits.quick_service import quick_consumers
from tests.nats_cluster import NatsCluster, copied, leader_of
from tests.trainer.conftest import tiny_base as tiny_base

pytestmark = pytest.mark.timeout(300)

EACH = 600
"""Publishes of each kind of contention, three writers at a time."""


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[NatsCluster]:
    """One whose servers have users, if its parameter is "guarded"."""
    extra = server_users(tmp_path) if getattr(request, "param", "") == "guarded" else ""
    made = NatsCluster(tmp_path / "nats", max_payload=32_768, extra=extra)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def nats_config(cluster: NatsCluster) -> NatsConfig:
    return NatsConfig(url=cluster.urls, replicas=3, connect_timeout_s=60, ack_timeout_s=2.0, publish_deadline_s=110)


@pytest.fixture
async def brokers(cluster: NatsCluster, nats_config: NatsConfig) -> AsyncIterator[list[Broker]]:
    """One connection to each node."""
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(Broker.connect(nats_config, name="first"))]
        await cluster.healthy()
        for node in cluster.nodes:
            config = msgspec.structs.replace(nats_config, url=node.url)
            made.append(await stack.enter_async_context(Broker.connect(config, provision=False)))
        yield made[1:]


async def test_a_stream_without_a_leader_is_not_called_deleted(cluster: NatsCluster) -> None:
    config = NatsConfig(url=cluster.urls, replicas=1, connect_timeout_s=60, ack_timeout_s=2.0)
    async with Broker.connect(config, name="first") as broker:
        await cluster.healthy()
        leader = cluster.node(await leader_of(broker.client, "ROLLOUTS"))
        other = next(node for node in cluster.nodes if node is not leader)
    async with Broker.connect(NatsConfig(url=other.url, ack_timeout_s=2.0), provision=False) as broker:
        with anyio.fail_after(100):  # beside other tests, an answer may take longer than its time-out
            while await health.probe(broker, "ROLLOUTS", 2.0) is not None:
                await anyio.sleep(0.1)
            while "does not exist" not in await broker.why_no_answer("OTHER"):
                await anyio.sleep(0.1)
        leader.kill()
        while (refusal := await health.probe(broker, "ROLLOUTS", 2.0)) is None:
            await anyio.sleep(0.1)
        assert "no leader" in refusal.reason or "did not take a write" in refusal.reason
        assert "has no leader" in await broker.why_no_answer("ROLLOUTS")


async def test_1800_contended_publishes_without_a_refusal_or_a_stale_decision(brokers: list[Broker]) -> None:
    async def publish(broker: Broker, event: Event) -> None:
        ack = await broker.publish(event)
        acks.setdefault(event.subject(), []).append(ack)
        found = await broker.read(type(event), **keys_of(event))
        last = await broker.read_last(type(event), **keys_of(event))
        assert last is not None
        assert [*(r.seq for r in found), last.seq] == [ack.seq] * 2, "a read does not see what was acknowledged"

    # No node dies here. An acknowledgement that comes late is waited for: the repeat of a publish that the log holds is
    # a duplicate too, and then all three would be.
    for broker in brokers:
        broker.config = msgspec.structs.replace(broker.config, ack_timeout_s=100)

    # The same event by three writers at once, with one message id; and for a subject that holds one event only.
    for make in (exchange, completed):
        acks: dict[str, list[Any]] = {}
        async with anyio.create_task_group() as tg:
            for number in range(EACH // 3):
                for broker in brokers:
                    tg.start_soon(publish, broker, make(f"t{number}"))
        for subject, three in acks.items():
            assert len({a.seq for a in three}) == 1, subject
            assert Counter(a.duplicate for a in three) == {False: 1, True: 2}
        assert sum(map(len, acks.values())) == EACH

    # Calls of one run at three gateway replicas: each is recorded once, under a number of its own.
    runs, calls = 20, EACH // 20 // 3
    registries = [Registry(broker, "p", TrajectoryTokens(b"secret", "p")) for broker in brokers]
    for run in range(runs):
        await registries[0].open(opened(f"run{run}"), "")

    async def replica(registry: Registry, number: int, run: int) -> None:
        found = await registry.find(f"run{run}")
        for call in range(calls):
            body = b'{"replica": %d, "call": %d}' % (number, call)
            await found.record([exchange(f"run{run}", request=body)])

    async with anyio.create_task_group() as tg:
        for run in range(runs):
            for number, registry in enumerate(registries):
                tg.start_soon(replica, registry, number, run)
    for run in range(runs):
        exchanges = [r.event for r in await brokers[0].read(ExchangeRecorded, project="p", trajectory=f"run{run}")]
        assert [e.seq for e in exchanges] == list(range(3 * calls))
        assert len({e.request for e in exchanges}) == 3 * calls


@pytest.mark.slow
async def test_judges_at_three_nodes_score_each_group_once_and_timers_survive_their_leader(
    cluster: NatsCluster, nats_config: NatsConfig, brokers: list[Broker]
) -> None:
    """Every third group lacks a trajectory and times out. Judges read from the replica at hand, which may lag."""
    count, size = 45, 3
    config = Config(nats=nats_config, judge=JudgeConfig(group_size=size, timeout_s=5.0))

    async def judge(broker: Broker) -> None:
        async with broker.consume("judge") as completions, broker.consume("judge-timers") as timers:
            await Judge(broker, config, None, "j").run(completions, timers)

    async def play(group: int) -> None:
        for member in range(size - (group % 3 == 0)):
            event = completed(f"{group}-{member}", group=f"g{group}", reward=float(member))
            await brokers[member].publish(event)

    async def ended() -> tuple[list[GroupScored], list[GroupDiscarded]]:
        scored, discarded = await brokers[0].read(GroupScored), await brokers[0].read(GroupDiscarded)
        return [r.event for r in scored], [r.event for r in discarded]

    async with anyio.create_task_group() as judges:
        for broker in brokers:
            judges.start_soon(judge, broker)
        async with anyio.create_task_group() as tg:
            for group in range(count):
                tg.start_soon(play, group)
        leader = cluster.node(await leader_of(brokers[0].client, "TIMERS"))
        await anyio.to_thread.run_sync(leader.kill)
        await anyio.to_thread.run_sync(leader.start)
        with anyio.fail_after(120):
            while True:
                lag = await brokers[0].lag("judge")  # before what was published by then
                scored, discarded = await ended()
                closed = len(scored) + sum(e.reason != "late" for e in discarded)
                if closed >= count and not lag:
                    break
                await anyio.sleep(0.1)  # the log can only be asked
        judges.cancel_scope.cancel()
    expected = await expected_groups(brokers[0], size)
    ends = [(e.group, tuple(m.trajectory for m in e.members)) for e in scored]
    ends += [(e.group, e.trajectories) for e in discarded if e.reason != "late"]
    assert Counter(ends) == {(group, of.members): 1 for group, of in expected.items()}
    assert {e.group: e.closed_by for e in scored} == {e.group: expected[e.group].closed_by for e in scored}
    late = Counter(t for e in discarded if e.reason == "late" for t in e.trajectories)
    assert late == {t: 1 for of in expected.values() for t in of.late}


@pytest.mark.slow
async def test_a_follower_of_a_stream_skips_no_event(cluster: NatsCluster, nats_config: NatsConfig) -> None:
    """Every gateway replica must know every checkpoint: nodes die, and the events come all, in order and once."""
    count, seen = 60, []
    async with Broker.connect(nats_config) as broker, Broker.connect(nats_config, provision=False) as publisher:
        await cluster.healthy()

        async def follow() -> None:
            async for recorded in follow_events(broker, [CheckpointPublished], lambda: 1, project="p"):
                seen.append(recorded.event.step)
                if len(seen) == count:
                    return

        async def publish() -> None:
            for step in range(1, count + 1):
                await publisher.publish(checkpoint(step))

        async with anyio.create_task_group() as tg:
            tg.start_soon(follow)
            tg.start_soon(publish)
            for node in cluster.nodes:
                await anyio.to_thread.run_sync(node.kill)
                await anyio.to_thread.run_sync(node.start)
                await cluster.healthy()
    assert seen == list(range(1, count + 1))


@pytest.mark.slow
async def test_changed_settings_are_applied_to_existing_streams(
    tmp_path: Path, nats_config: NatsConfig, cluster: NatsCluster
) -> None:
    one = NatsConfig(url=f"{cluster.urls[0]}, {cluster.urls[1]}", replicas=1, connect_timeout_s=60)
    async with Broker.connect(one) as broker:
        await cluster.healthy()
        await broker.publish(exchange())
        await broker.put_object("ADAPTERS", "m@1", b"abc" * 1000)
    async with Broker.connect(nats_config) as broker:
        for name in [s.name for s in streams.STREAMS] + [streams.bucket_stream(b.name) for b in streams.buckets()]:
            assert (await broker.stream_info(name)).config.num_replicas == 3, name
            with anyio.fail_after(60):
                await copied(broker.client, name)
        # Any two of the three hold everything.
        await anyio.to_thread.run_sync(cluster.node(await leader_of(broker.client, "OBJ_ADAPTERS")).kill)
        assert await broker.get_object("ADAPTERS", "m@1") == b"abc" * 1000
        assert len(await read_stream(broker, "ROLLOUTS")) == 1


KILLS = int(os.environ.get("JOURNEYWORK_NODE_KILLS", "0"))
"""Nodes killed in the crash matrix: by default a few; 100 is what docs/performance.md reports."""
DEATHS = (
    {"gateway": 42, "sampler": 10, "judge": 40, "trainer": 52, "store": 48}
    if KILLS
    else {"gateway": 5, "sampler": 3, "judge": 4, "trainer": 6, "store": 5}
)
FEW_KILLS = 6


@pytest.mark.timeout(3600 if KILLS else 1800)
@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["guarded"], indirect=True)
async def test_services_and_nodes_die_and_nothing_is_lost_or_doubled(
    cluster: NatsCluster, nats_config: NatsConfig, tiny_base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash matrix on three nodes; no service exits by itself."""
    monkeypatch.setattr(streams, "CONSUMERS", quick_consumers(ACK_WAIT_S, endless=True))
    kills = KILLS or FEW_KILLS
    config = settings(nats_config, tiny_base, tmp_path)

    async def kill_nodes() -> int:
        rng = random.Random(f"{SEED}/nodes")
        await cluster.healthy()
        async with Broker.connect(config.nats) as broker:
            for number in range(kills):
                await anyio.sleep(rng.uniform(0.2, 1.0))  # the schedule: when it dies
                node = rng.choice(cluster.nodes)
                if number % 3 == 0:  # one that is sure to hurt
                    node = cluster.node(await leader_of(broker.client, "ROLLOUTS", "judge"))
                await anyio.to_thread.run_sync(node.kill)
                await anyio.to_thread.run_sync(node.start)
                if number % 4:  # else the next dies before this one is back: no quorum for a while
                    await cluster.healthy()
        return kills

    matrix = await run_matrix(config, DEATHS, kill_nodes, least=(150, 10) if KILLS else (20, 5))
    assert not matrix.endings.gave_up
    assert len(matrix.endings) >= sum(DEATHS.values()) + kills
    assert [line for node in cluster.nodes for line in violations(node.log)] == []
