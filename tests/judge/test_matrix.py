"""Three judges that die and are stopped while they share one log score each group once.

Trajectories arrive in a mixed order; of some groups one is missing until the end, so that those groups time out. The
judges are processes; the judge model is the scoring server in this process, which notes which of them asked."""

from __future__ import annotations

import random
import re
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from pipeline import streams
from pipeline.config import Config, JudgeConfig, NatsConfig, save
from pipeline.events import DeadLettered, GroupDiscarded, GroupScored
from pipeline.log.broker import Broker
from tests.judge.kit import completed, exchange, expected_groups
from tests.kits.crash.processes import ForkServer, ServiceProcess, fork_server
from tests.kits.quick_service import quick_consumers
from tests.kits.scoring_server import ScoringServer

pytestmark = pytest.mark.anyio

SEED = 20261122
JUDGES, GROUPS, MEMBERS, PASSES = 3, 50, 4, 2
LACKING = range(24, GROUPS, 25)
"""Groups that lack a trajectory until the end."""
KILLS = 6
STOP_S, ACK_WAIT_S, TIMEOUT_S = 2.0, 1.0, 5.0
"""A judge is stopped for longer than the log waits for it; a group waits longer than that."""
EACH_GROUP = {
    "judge.timer_set": 1,
    "judge.before_publish": 1,
    "judge.after_publish": 1,
    "broker.before_publish": 1,
    "broker.after_publish": 1,
    "broker.before_ack": MEMBERS,
    "broker.after_ack": MEMBERS,
}
"""Stop points of a judge, and about how often it passes them for each group."""
A_PROCESS = 3
"""About how many groups a judge scores before it dies."""


@dataclass
class NotingServer(ScoringServer):
    """A scoring server whose address holds the number of a judge's process: `/judge-7/v1`."""

    asked: Counter[int] = field(default_factory=Counter)
    """Calls of each process."""

    async def _answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Any:
        if number := re.search(r"judge-(\d+)", path):
            self.asked[int(number[1])] += 1
        return await super()._answer(method, path, headers, body)


@dataclass
class Judges:
    """Processes of judges; each dies at a point that the seed chose, but for the last ones."""

    nats: NatsConfig
    folder: Path
    model: NotingServer
    forks: ForkServer
    rng: random.Random = field(default_factory=lambda: random.Random(SEED))
    kills_left: int = KILLS
    stopped: bool = False

    def _settings(self, number: int) -> Path:
        path = self.folder / f"judge-{number}.toml"
        judge = JudgeConfig(
            model="openai/scorer",
            api_base=self.model.url.replace("/v1", f"/judge-{number}/v1"),
            concurrency=4,
            passes=PASSES,
            timeout_s=TIMEOUT_S,
            min_size=2,
        )
        save(Config(project="p", run_dir=str(self.folder), nats=self.nats, judge=judge), path)
        return path

    async def run(self) -> None:
        """One judge, whose processes follow each other."""
        while True:
            where = ""
            if self.kills_left:
                self.kills_left -= 1
                point = self.rng.choice(list(EACH_GROUP))
                where = f"{point}:{self.rng.randint(1, 2 * EACH_GROUP[point] * A_PROCESS)}"
            process = self.forks.start("judge", where, self._settings(self.forks.next_number))
            async with anyio.create_task_group() as tg:
                if not self.stopped:
                    self.stopped = True
                    tg.start_soon(self._stop, process)
                if where:
                    tg.start_soon(self._kill, process)
                await process.ended.wait()
                tg.cancel_scope.cancel()
            assert process.status == -signal.SIGKILL, f"a judge ended with {process.status} at {where}"

    async def _kill(self, process: ServiceProcess) -> None:
        """Kill a judge that scores many groups and does not pass its stop point."""
        while self.model.asked[process.number] < 4 * A_PROCESS:
            await anyio.sleep(0.2)
        process.send(signal.SIGKILL)

    async def _stop(self, process: ServiceProcess) -> None:
        """Stop a judge once it scores, and let it go on."""
        while not self.model.asked[process.number]:
            await anyio.sleep(0.02)
        process.send(signal.SIGSTOP)
        await anyio.sleep(STOP_S)  # what is tested: a judge that does not answer for so long
        process.send(signal.SIGCONT)


def end_of(group: int, member: int) -> Any:
    return completed(f"t{group}-{member}", f"g{group}", group_size=MEMBERS, exchanges=1)


async def publish(broker: Broker, rng: random.Random) -> None:
    """Publish the trajectories in mixed order, not far ahead of the judges."""
    for begin in range(0, GROUPS, GROUPS // 2):
        some = range(begin, begin + GROUPS // 2)
        members = [(g, m) for g in some for m in range(MEMBERS - (g in LACKING))]
        rng.shuffle(members)
        for group, member in members:
            await broker.publish(exchange(f"t{group}-{member}", f"quality={(member + 1) / 10}"))
            await broker.publish(end_of(group, member))
        while (await broker.stream_info("GROUPS")).state.messages < begin - len(LACKING):
            await anyio.sleep(0.05)  # the stream can only be asked


async def settled(broker: Broker) -> None:
    """Until every delivery is acknowledged and no group waits for its deadline."""
    while await broker.lag("judge") or (await broker.stream_info(streams.TIMERS.name)).state.messages:
        await anyio.sleep(0.05)  # the server can only be asked


@pytest.mark.timeout(600)
@pytest.mark.slow
async def test_three_judges_that_are_killed_and_stopped_score_each_group_once(
    nats_config: NatsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CONSUMERS", quick_consumers(ACK_WAIT_S))
    model = NotingServer(delay_s=0.02)
    async with Broker.connect(msgspec.structs.replace(nats_config, provision=True)) as broker:
        async with (
            model.run(),
            fork_server(tmp_path, "judge", "openai.resources.chat", ack_wait_s=ACK_WAIT_S) as forks,
            anyio.create_task_group() as running,
        ):
            judges = Judges(nats_config, tmp_path, model, forks)
            for _ in range(JUDGES):
                running.start_soon(judges.run)
            await publish(broker, judges.rng)
            await settled(broker)
            for group in LACKING:
                await broker.publish(end_of(group, MEMBERS - 1))
            await settled(broker)
            running.cancel_scope.cancel()
        scored = [r.event for r in await broker.read(GroupScored)]
        discarded = [r.event for r in await broker.read(GroupDiscarded)]
        expected = await expected_groups(broker, MEMBERS)
        assert await broker.read(DeadLettered) == []
    assert judges.kills_left < KILLS - JUDGES  # some died, and others followed them
    assert len(expected) == GROUPS
    # Each group ended once, with the members that the log says.
    ends = Counter((e.group, tuple(m.trajectory for m in e.members)) for e in scored)
    ends.update((e.group, e.trajectories) for e in discarded if e.reason == "too_small")
    assert ends == {(name, group.members): 1 for name, group in expected.items()}
    assert {e.group: e.closed_by for e in scored} == {
        name: group.closed_by for name, group in expected.items() if len(group.members) > 1
    }
    # By the judge model, in each pass; and each late trajectory was recorded once.
    assert {len(e.verdicts) for e in scored} == {PASSES}
    assert len(scored) > GROUPS / 2
    late = Counter((e.reason, *e.trajectories) for e in discarded if e.reason != "too_small")
    assert late == {("late", t): 1 for group in expected.values() for t in group.late}
