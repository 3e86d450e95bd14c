"""A judge that dies at each boundary while it waits for feedback: each signal has its effect, once."""

from __future__ import annotations

import signal as signals
from collections import Counter
from pathlib import Path

import anyio
import msgspec
import pytest

from pipeline import streams
from pipeline.config import Config, FeedbackConfig, JudgeConfig, NatsConfig, RewardConfig, save
from pipeline.events import DeadLettered, FeedbackTimedOut, GroupDiscarded, GroupScored
from pipeline.log.broker import Broker
from tests.judge.test_feedback import run, signal
from tests.kits.crash.processes import fork_server
from tests.kits.quick_service import quick_consumers

pytestmark = pytest.mark.anyio

POINTS = (
    "judge.feedback_timer_set", "judge.before_publish", "judge.after_publish", "broker.before_publish",
    "broker.after_publish", "broker.before_ack", "broker.after_ack",
)  # fmt: skip
PASSAGES = (1, 3)
RUNS = 8
"""Runs of a death: of each fourth one the feedback comes before its end, after it, too late, and not at all."""


async def settled(broker: Broker, *, overdue: int) -> None:
    """Until every delivery is acknowledged and the waiting of so many runs in all has ended."""
    while await broker.lag("judge") or len(await broker.read(FeedbackTimedOut)) < overdue:
        await anyio.sleep(0.05)  # the server can only be asked
    while (await broker.stream_info(streams.TIMERS.name)).state.messages or await broker.lag("judge-timers"):
        await anyio.sleep(0.05)


@pytest.mark.timeout(300)
@pytest.mark.slow
async def test_each_signal_counts_once_whenever_a_judge_dies(
    nats_config: NatsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CONSUMERS", quick_consumers(0.5, endless=True))
    rewards = (RewardConfig(name="result", kind="feedback"),)
    config = Config(
        project="p", run_dir=str(tmp_path), nats=nats_config, feedback=FeedbackConfig(wait_s=1.0),
        judge=JudgeConfig(min_size=1, rewards=rewards),
    )  # fmt: skip
    save(config, tmp_path / "judge.toml")
    deaths = Counter[str]()
    given: dict[str, float] = {}
    async with Broker.connect(msgspec.structs.replace(nats_config, provision=True)) as broker:
        async with fork_server(tmp_path / "judge.toml", "judge", ack_wait_s=0.5) as server:
            overdue = 0
            for where in (f"{point}:{passage}" for point in POINTS for passage in PASSAGES):
                dying = server.start("judge", where)
                names = [f"{where.replace('.', '-').replace(':', '-')}-{number}" for number in range(RUNS)]
                for number, name in enumerate(names):
                    if number % 4 != 3:
                        given[name] = number / RUNS
                    if number % 4 == 0:
                        await broker.publish(signal(name, given[name]))
                    await broker.publish(run(name))
                    if number % 4 == 1:
                        await broker.publish(signal(name, given[name]))
                overdue += RUNS // 2
                with anyio.move_on_after(3):
                    await dying.ended.wait()
                assert dying.status in (None, -signals.SIGKILL)
                deaths[where.partition(":")[0]] += dying.status == -signals.SIGKILL
                if dying.status is None:
                    await dying.end(signals.SIGKILL)
                heir = server.start("judge")
                await settled(broker, overdue=overdue)
                for name in names[2::4]:
                    await broker.publish(signal(name, given[name]))
                await settled(broker, overdue=overdue)
                await heir.end(signals.SIGKILL)
        scored = Counter(
            (m.trajectory, m.reward) for r in await broker.read(GroupScored) for m in r.event.members
        )
        discarded = Counter(t for r in await broker.read(GroupDiscarded) for t in r.event.trajectories)
        assert scored == Counter(given.items())
        every = [f"{p.replace('.', '-')}-{n}-{i}" for p in POINTS for n in PASSAGES for i in range(RUNS)]
        assert discarded == {name: 1 for name in every if int(name.rpartition("-")[2]) % 4 >= 2}
        assert await broker.read(DeadLettered) == []
    assert min(deaths[point] for point in POINTS) > 0, deaths
