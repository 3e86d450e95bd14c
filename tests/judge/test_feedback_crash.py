"""A judge that dies at each boundary while it waits for feedback: each signal has its effect, once."""

from __future__ import annotations

import signal as signals
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec
import pytest

from pipeline import streams
from pipeline.config import Config, FeedbackConfig, JudgeConfig, NatsConfig, RewardConfig, save
from pipeline.events import DeadLettered, FeedbackTimedOut, GroupDiscarded, GroupScored
from pipeline.log.broker import Broker
from tests.judge.test_feedback import run, signal
from tests.kits.crash.processes import ServiceProcess, fork_server
from tests.kits.quick_service import quick_consumers

pytestmark = pytest.mark.anyio

POINTS = (
    "judge.feedback_timer_set", "judge.before_publish", "judge.after_publish", "broker.before_publish",
    "broker.after_publish", "broker.before_ack", "broker.after_ack",
)  # fmt: skip
PASSAGES = (1, 3)
"""Two judges die at each point, at different passages of it."""
RUNS = 64
"""Of each fourth one the feedback comes before its end, after it, too late, and not at all."""


async def settled(broker: Broker) -> None:
    """Until every delivery is acknowledged and the waiting of half the runs has ended."""
    while await broker.lag("judge") or len(await broker.read(FeedbackTimedOut)) < RUNS // 2:
        await anyio.sleep(0.05)  # the server can only be asked
    while (await broker.stream_info(streams.TIMERS.name)).state.messages or await broker.lag("judge-timers"):
        await anyio.sleep(0.05)


async def dead_or_settled(dying: Sequence[ServiceProcess], broker: Broker) -> None:
    """Until all judges have died, or some are left that will not pass their points any more."""
    async with anyio.create_task_group() as waiting:

        async def dead() -> None:
            for judge in dying:
                await judge.ended.wait()
            waiting.cancel_scope.cancel()

        waiting.start_soon(dead)
        await settled(broker)
        waiting.cancel_scope.cancel()


@pytest.mark.timeout(300)
@pytest.mark.slow
async def test_each_signal_counts_once_whenever_a_judge_dies(
    nats_config: NatsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CONSUMERS", quick_consumers(0.5, endless=True))
    rewards = (RewardConfig(name="result", kind="feedback"),)
    config = Config(
        project="p", run_dir=str(tmp_path), nats=nats_config, feedback=FeedbackConfig(wait_s=8.0),
        judge=JudgeConfig(min_size=1, rewards=rewards),
    )  # fmt: skip
    save(config, tmp_path / "judge.toml")
    names = [f"run-{number}" for number in range(RUNS)]
    given = {name: number / RUNS for number, name in enumerate(names) if number % 4 != 3}
    async with (
        Broker.connect(msgspec.structs.replace(nats_config, provision=True)) as broker,
        fork_server(tmp_path / "judge.toml", "judge", ack_wait_s=0.5) as server,
    ):
        dying = [server.start("judge", f"{point}:{passage}") for point in POINTS for passage in PASSAGES]
        with anyio.fail_after(200):
            for judge in dying:
                await judge.ready.wait()  # from now on each gets its share
            for number, name in enumerate(names):
                if number % 4 == 0:
                    await broker.publish(signal(name, given[name]))
                await broker.publish(run(name))
                if number % 4 == 1:
                    await broker.publish(signal(name, given[name]))
            await dead_or_settled(dying, broker)
            deaths = Counter(j.where.partition(":")[0] for j in dying if j.status == -signals.SIGKILL)
            for judge in dying:
                assert await judge.end(signals.SIGKILL) == -signals.SIGKILL
            for point in (p for p in POINTS if p not in deaths):
                # The others took what this one's judges would have needed.
                alone = server.start("judge", f"{point}:1")
                given[point] = 0.5
                await broker.publish(run(point))
                await broker.publish(signal(point, given[point]))
                await alone.ended.wait()
                deaths[point] += alone.status == -signals.SIGKILL
            heir = server.start("judge")
            await settled(broker)
            for name in names[2::4]:
                await broker.publish(signal(name, given[name]))
            await settled(broker)
            await heir.end(signals.SIGKILL)
        scored = Counter(
            (m.trajectory, m.reward) for r in await broker.read(GroupScored) for m in r.event.members
        )
        discarded = Counter(t for r in await broker.read(GroupDiscarded) for t in r.event.trajectories)
        assert scored == Counter(given.items())
        assert discarded == {name: 1 for number, name in enumerate(names) if number % 4 >= 2}
        assert await broker.read(DeadLettered) == []
    assert set(+deaths) == set(POINTS), deaths
