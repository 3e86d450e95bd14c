"""Several judges on one log that are killed at stop points and stopped for a while, and what must hold in the end.

Trajectories arrive in a mixed order; of some groups one is missing until the end, so that those groups time out. The
judges are processes; the judge model is the scoring server, in this process, which notes which process asked
for which group."""

from __future__ import annotations

import random
import re
import signal
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec

from pipeline import streams
from pipeline.config import Config, JudgeConfig, NatsConfig, save
from pipeline.events import DeadLettered, GroupDiscarded, GroupScored, GroupTimedOut, TrajectoryCompleted
from pipeline.log.broker import Broker
from tests.judge.kit import completed, exchange
from tests.kits.crash.fork_server import quick_consumers
from tests.kits.crash.processes import ForkServer, ServiceProcess, fork_server
from tests.kits.scoring_server import ScoringServer

SEED = 20261122
JUDGES = 3
MEMBERS = 4
MIXED = 48
"""Groups whose trajectories arrive mixed with each other's."""
ONE_LACKS = 25
"""Of so many groups, one lacks a trajectory."""
POINTS = {
    "judge.timer_set": 1,
    "judge.before_publish": 1,
    "judge.after_publish": 1,
    "broker.before_publish": 1,
    "broker.after_publish": 1,
    "broker.before_ack": MEMBERS,
    "broker.after_ack": MEMBERS,
}
"""Crash points that a judge passes, and about how often for each group."""


@dataclass(frozen=True)
class Plan:
    """How large a run is."""

    groups: int
    kills: int
    groups_a_process: int
    """About how many groups a judge scores before it dies."""
    stops: int
    """How often a judge is stopped (SIGSTOP) and goes on later."""
    stop_s: float
    ack_wait_s: float
    timeout_s: float
    delay_s: float = 0.02
    """Time in which the scoring server answers."""
    concurrency: int = 4
    passes: int = 2


@dataclass
class NotingServer(ScoringServer):
    """A scoring server whose address holds the number of a judge's process: `/judge-7/v1`."""

    asked: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(process, group) to the calls for that group."""

    async def _answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, Any]]:
        if method == "POST":
            judge, task = re.search(r"judge-(\d+)", path), re.search(rb"task (\d+)\b", body)
            assert judge is not None
            assert task is not None
            self.asked[int(judge.group(1)), int(task.group(1))] += 1
        return await super()._answer(method, path, headers, body)


class Matrix:
    """One run."""

    def __init__(self, nats: NatsConfig, folder: Path, plan: Plan) -> None:
        self.nats, self.folder, self.plan = nats, folder, plan
        self.rng = random.Random(SEED)
        self.server = NotingServer(delay_s=plan.delay_s)
        self.kills_left, self.stops_left = plan.kills, plan.stops
        self.died: dict[int, int] = {}
        """Process to the last sequence of GROUPS when its end was noticed."""
        self.deaths: Counter[str] = Counter()
        self.killed: set[int] = set()
        """Processes that this test killed, wherever they were."""
        self.lacking = {g for g in range(plan.groups) if g % ONE_LACKS == ONE_LACKS - 1}

    async def run(self, broker: Broker) -> dict[str, Any]:
        """Run to the end; return the figures of a report. `broker` must have provisioned the quick consumers."""
        wait_s = self.plan.ack_wait_s
        async with (
            self.server.run(),
            fork_server(self.folder, "judge", "openai.resources.chat", ack_wait_s=wait_s) as server,
            anyio.create_task_group() as judges,
        ):
            for _ in range(JUDGES):
                judges.start_soon(self._judge, server, broker)
            await self._publish(broker)
            await self._settled(broker)
            for group in self.lacking:
                await broker.publish(self._completed(group, MEMBERS - 1))
            await self._settled(broker)
            judges.cancel_scope.cancel()
        return await self._check(broker)

    def _completed(self, group: int, member: int) -> Any:
        return completed(f"t{group}-{member}", f"g{group}", group_size=MEMBERS, exchanges=1)

    async def _publish(self, broker: Broker) -> None:
        """Publish every trajectory, not far ahead of the judges."""
        for begin in range(0, self.plan.groups, MIXED):
            some = range(begin, min(begin + MIXED, self.plan.groups))
            members = [(g, m) for g in some for m in range(MEMBERS - (g in self.lacking))]
            self.rng.shuffle(members)
            async with anyio.create_task_group() as tg:
                for group, member in members:
                    text = f"quality={(member + 1) / 10}"
                    tg.start_soon(broker.publish, exchange(f"t{group}-{member}", text, task=f"task {group} "))
            for group, member in members:
                await broker.publish(self._completed(group, member))
            await self._scored(broker, begin - MIXED)

    async def _scored(self, broker: Broker, count: int) -> None:
        while (await broker.stream_info("GROUPS")).state.messages < count - len(self.lacking):
            await anyio.sleep(0.05)  # the stream can only be asked

    async def _settled(self, broker: Broker) -> None:
        """Until every delivery is acknowledged and no group waits for its deadline."""
        while await broker.lag("judge") or (await broker.stream_info(streams.TIMERS.name)).state.messages:
            await anyio.sleep(0.05)  # the server can only be asked

    def _config(self, number: int) -> Path:
        path = self.folder / f"judge-{number}.toml"
        base = self.server.url.replace("/v1", f"/judge-{number}/v1")
        judge = JudgeConfig(
            model="openai/scorer", api_base=base, concurrency=self.plan.concurrency, passes=self.plan.passes,
            timeout_s=self.plan.timeout_s, min_size=2,
        )  # fmt: skip
        save(Config(project="p", run_dir=str(self.folder), nats=self.nats, judge=judge), path)
        return path

    async def _judge(self, server: ForkServer, broker: Broker) -> None:
        """Processes of one judge, one after the other: each dies at a point that the seed chose, and may be stopped
        for a while. The last one is not killed."""
        while True:
            where = ""
            if self.kills_left:
                self.kills_left -= 1
                point = self.rng.choice(list(POINTS))
                where = f"{point}:{self.rng.randint(1, 2 * POINTS[point] * self.plan.groups_a_process)}"
            number = server.next_number
            process = server.start("judge", where, self._config(number))
            async with anyio.create_task_group() as tg:
                if self.stops_left:
                    self.stops_left -= 1
                    tg.start_soon(self._stop, process)
                if where:
                    tg.start_soon(self._kill, process)
                await process.ended.wait()
                tg.cancel_scope.cancel()
            assert process.status == -signal.SIGKILL, f"a judge ended with {process.status} at {where}"
            self.deaths["elsewhere" if number in self.killed else where.partition(":")[0]] += 1
            self.died[number] = (await broker.stream_info("GROUPS")).state.last_seq

    async def _kill(self, process: ServiceProcess) -> None:
        """Kill a judge that scores many groups and does not pass its crash point."""
        while (
            sum(number == process.number for number, _ in self.server.asked) < 4 * self.plan.groups_a_process
        ):
            await anyio.sleep(0.2)
        self.killed.add(process.number)
        process.send(signal.SIGKILL)

    async def _stop(self, process: ServiceProcess) -> None:
        """Stop a judge once it scores, and let it go on."""
        while not any(number == process.number for number, _ in self.server.asked):
            await anyio.sleep(0.02)
        process.send(signal.SIGSTOP)
        self.deaths["stopped and continued"] += 1
        await anyio.sleep(self.plan.stop_s)  # what is tested: a judge that does not answer for so long
        process.send(signal.SIGCONT)

    async def _check(self, broker: Broker) -> dict[str, Any]:
        plan = self.plan
        scored = await broker.read(GroupScored)
        discarded = [r.event for r in await broker.read(GroupDiscarded)]
        assert await broker.read(DeadLettered) == []
        expected = await expected_groups(broker)
        assert len(expected) == plan.groups
        # Each group ended once, with the members that the log says.
        ends = Counter((e.group, tuple(m.trajectory for m in e.members)) for e in (r.event for r in scored))
        ends.update((e.group, e.trajectories) for e in discarded if e.reason == "too_small")
        assert ends == {(name, group.members): 1 for name, group in expected.items()}
        assert {r.event.group: r.event.closed_by for r in scored} == {
            name: group.closed_by for name, group in expected.items() if len(group.members) > 1
        }
        assert all(len(r.event.verdicts) == plan.passes for r in scored)
        # And each late trajectory was recorded once.
        late = Counter((e.reason, *e.trajectories) for e in discarded if e.reason != "too_small")
        assert late == {("late", t): 1 for group in expected.values() for t in group.late}
        at = {int(r.event.group[1:]): r.seq for r in scored}
        # What a process had asked for a group that was not on the log when it died was lost with it.
        lost = sum(
            n
            for (process, group), n in self.server.asked.items()
            if process in self.died and at[group] > self.died[process]
        )
        calls = self.server.asked.total()
        return {
            "judges": JUDGES,
            "groups": plan.groups,
            "members": MEMBERS,
            "timed_out": sum(g.closed_by == "timeout" for g in expected.values()),
            "late": late.total(),
            "scored_once": len(scored),
            "kills": self.deaths.total() - self.deaths["stopped and continued"],
            "deaths": dict(sorted(self.deaths.items())),
            "stop_s": plan.stop_s,
            "ack_wait_s": plan.ack_wait_s,
            "judge_answers_after_s": plan.delay_s,
            "concurrency": plan.concurrency,
            "calls": calls,
            "calls_lost_in_deaths": lost,
            "least_calls_of_a_group": min(
                sum(n for (_, asked), n in self.server.asked.items() if asked == group) for group in at
            ),
            "times_ideal_calls": (calls - lost) / (len(scored) * plan.passes),
            "times_ideal_calls_with_lost": calls / (len(scored) * plan.passes),
        }


class Expected(NamedTuple):
    """What the log says of a group."""

    members: tuple[str, ...]
    late: tuple[str, ...]
    closed_by: str


async def expected_groups(broker: Broker, size: int = MEMBERS) -> dict[str, Expected]:
    """What must become of each group of `size`, counted in the order of the log: a slow machine may let a group time
    out that has all its trajectories in the end."""
    events = await broker.read_all((TrajectoryCompleted, GroupTimedOut))
    order: dict[str, list[str]] = defaultdict(list)
    """Group to its trajectories in their order; an empty text is the end of its time."""
    for event in (r.event for r in events):
        order[event.group].append(event.trajectory if isinstance(event, TrajectoryCompleted) else "")
    out = {}
    for group, names in order.items():
        before = names[: names.index("")] if "" in names else names
        after = [n for n in names[len(before) :] if n]
        full = len(before) >= size
        out[group] = Expected(tuple(before[:size]), (*before[size:], *after), "size" if full else "timeout")
    return out


async def play(nats: NatsConfig, folder: Path, plan: Plan) -> dict[str, Any]:
    """Run a matrix on an empty log."""
    before, streams.CONSUMERS = streams.CONSUMERS, quick_consumers(plan.ack_wait_s)
    try:
        async with Broker.connect(msgspec.structs.replace(nats, provision=True)) as broker:
            return await Matrix(nats, folder, plan).run(broker)
    finally:
        streams.CONSUMERS = before
