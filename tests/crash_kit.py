"""The crash matrix's kit: services that die at seeded points, agents that go on, and what must hold in the end.

Gateway, judge, trainer, store and nats-server run together as processes of their own. Each life of a service is told
at which stop point of `pipeline/crash.py` to die, and at which passage; the server is killed at seeded times. Agents
know nothing but HTTP and repeat what was not answered. The inference server is a small one in this process that
speaks vLLM's API: it stays up, so that what it answers can be compared with what was recorded.

As under `journeyman up`, every service has its own NATS user with the rights of `pipeline/security/users.py`, the
trainer signs its checkpoints and the gateway serves no others."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import msgspec
from anyio.abc import TaskStatus

from pipeline import config as configuration
from pipeline import crash, streams
from pipeline.config import (
    Config,
    GatewayConfig,
    JudgeConfig,
    LoraConfig,
    MemoryConfig,
    ModelConfig,
    NatsConfig,
    OptimizerConfig,
    ReplicasConfig,
    SigningConfig,
    StoreConfig,
    TrainerConfig,
    VllmConfig,
)
from pipeline.events import (
    CheckpointPublished,
    DeadLettered,
    ExchangeRecorded,
    GroupDiscarded,
    GroupScored,
    PolicyLoaded,
    TrajectoryCompleted,
    decode,
    unpack_ids,
)
from pipeline.log.broker import Broker
from pipeline.security import signing, users
from store import sql
from store.local import LocalTarget
from tests.conftest import free_port
from tests.crash_nursery import SERVICES
from tests.kits.log import read_stream
from tests.kits.upstream import Upstream
from tests.store.kit import stored_events
from tests.trainer import kit

SEED = 20261121
GROUP, TURNS, LANES = 2, 2, 4
GARBAGE = b"\xc1"
PATIENCE_S = 12.0
MISSES = 3
"""Number of lives of a service that may miss a stop point before the point is skipped."""

_PUBLISHES = ("broker.before_publish", "broker.after_publish")
_ACKS = ("broker.before_ack", "broker.after_ack")
_UPLOADS = ("broker.before_upload",)


def points_of(service: str) -> list[str]:
    """The stop points that a service passes: its own, and those of the broker that it uses."""
    shared = {
        "gateway": (*_PUBLISHES, *_UPLOADS, "broker.after_claim"),
        "judge": (*_PUBLISHES, *_ACKS),
        "trainer": (*_PUBLISHES, *_ACKS, *_UPLOADS),
        "store": _PUBLISHES,
    }
    return [p for p in crash.POINTS if p.startswith(f"{service}.")] + list(shared[service])


class Nursery:
    """Lives of services; see `tests.crash_nursery`."""

    def __init__(self, config: Path) -> None:
        command = [sys.executable, "-m", "tests.crash_nursery"]
        self._config = str(config)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lives: dict[int, Life] = {0: Life(self, 0, "")}

    async def listen(self) -> None:
        """Forward the output of a life until it ends."""
        assert self._process.stdout is not None
        while line := await anyio.to_thread.run_sync(self._process.stdout.readline, abandon_on_cancel=True):
            facts = json.loads(line)
            life = self._lives[facts["id"]]
            if "ready" in facts:
                life.ready.set()
            if "status" in facts:
                life.status = facts["status"]
                life.ended.set()
        raise RuntimeError("the nursery of services died: see its output")

    async def imported(self) -> None:
        await self._lives[0].ready.wait()

    def begin(self, service: str, where: str = "") -> Life:
        life = Life(self, len(self._lives), where)
        self._lives[life.number] = life
        self.order({"id": life.number, "service": service, "config": self._config, "crash": where})
        return life

    def order(self, order: dict[str, str | int]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Kill all running processes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


@dataclass(eq=False)
class Life:
    """One life of a service."""

    nursery: Nursery
    number: int
    where: str
    status: int | None = None
    ready: anyio.Event = field(default_factory=anyio.Event)
    ended: anyio.Event = field(default_factory=anyio.Event)

    async def end(self, number: int) -> int:
        """Send a signal, unless the life is over; return the life's status once it is."""
        self.nursery.order({"id": self.number, "signal": number})
        await self.ended.wait()
        assert self.status is not None
        return self.status


@dataclass(eq=False)
class Deaths:
    """How the lives ended, counted."""

    at: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(service, stop point) to the deaths there."""
    elsewhere: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Killed by this test, as its stop point was not passed in time."""

    gave_up: Counter[str] = field(default_factory=Counter)
    """Exited by themselves, with an error, while the server was away."""

    def __len__(self) -> int:
        return self.at.total() + self.elsewhere.total()


class Fleet:
    """Agents in groups, with two turns each. They repeat every call until it is answered."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self._url, self._client = url, client
        self.rng = random.Random(SEED + 1)
        self.replies: dict[tuple[str, int], str] = {}
        """(trajectory, turn) to the id of the reply that the agent got."""
        self.finished: set[str] = set()
        self.stopping = False
        self.repeated = 0

    async def post(self, path: str, body: dict[str, Any], key: str = "none") -> dict[str, Any]:
        tries = 0
        while True:
            # What openai's clients send with a repeated request.
            headers = {"authorization": f"Bearer {key}", "x-stainless-retry-count": str(tries)}
            try:
                reply = await self._client.post(f"{self._url}{path}", json=body, headers=headers)
            except httpx.TransportError:
                reply = None
            if reply is not None and reply.status_code < 300:
                answer: dict[str, Any] = reply.json()
                return answer
            # The gateway is dead, has no log for the moment, or paces.
            assert reply is None or reply.status_code in (429, 502, 503), reply.text
            tries += 1
            self.repeated += 1
            await anyio.sleep(0.05)

    async def work(self, lane: int) -> None:
        index = 0
        while not self.stopping:
            async with anyio.create_task_group() as tg:
                for attempt in range(GROUP):
                    tg.start_soon(self.run, f"g{lane}.{index}", attempt)
            index += 1

    async def run(self, group: str, attempt: int) -> None:
        name = f"{group}-{attempt}"
        # Now and then an event that exceeds the payload limit.
        padding = {"user": "x" * 40_000} if self.rng.random() < 0.1 else {}
        opened = await self.post(
            "/v1/trajectories", {"model": "tiny", "group": group, "attempt": attempt, "id": name}
        )
        messages: list[dict[str, str]] = [{"role": "user", "content": group}]
        for turn in range(TURNS):
            body = {"model": "tiny", "messages": messages, "max_tokens": 3, **padding}
            reply = await self.post(f"/t/{name}/v1/chat/completions", body, opened["api_key"])
            self.replies[name, turn] = reply["id"]
            messages += [reply["choices"][0]["message"], {"role": "user", "content": "and?"}]
        # One group in eight has equal rewards: it is discarded.
        reward = 0.5 if self.rng.random() < 0.1 else attempt + self.rng.random()
        await self.post(f"/v1/trajectories/{name}/complete", {"reward": reward})
        self.finished.add(name)


class Matrix:
    """Runs the services through their schedules of deaths."""

    def __init__(self, nursery: Nursery, lives: Mapping[str, int], may_give_up: int = 0) -> None:
        """`lives` is the number of deaths by service. `may_give_up` is the number of exits with an error that are
        allowed in all."""
        self.nursery, self.lives, self.may_give_up = nursery, lives, may_give_up
        self.deaths = Deaths()
        self.last: dict[str, Life] = {}
        """By service, the life that is not killed."""

    async def service(self, name: str, *, task_status: TaskStatus[anyio.Event]) -> None:
        """Start the number of lives in `lives`, each of which dies at a seeded point, and then one that lives until
        it is stopped. The event is set when the last one has begun."""
        last = anyio.Event()
        task_status.started(last)
        rng = random.Random(f"{SEED}/{name}")
        points = points_of(name)
        chosen = [points[i % len(points)] for i in range(self.lives[name])]
        rng.shuffle(chosen)
        while chosen:
            point = chosen.pop()
            often = 12 if point in (*_PUBLISHES, *_ACKS, "gateway.before_answer") else 2
            life = self.nursery.begin(name, f"{point}:{rng.randint(1, often)}")
            with anyio.move_on_after(PATIENCE_S):
                await life.ended.wait()
            if life.status is None:
                await life.end(signal.SIGKILL)
                self.deaths.elsewhere[name, point] += 1
                if self.deaths.elsewhere[name, point] < MISSES:
                    chosen.insert(0, point)  # a busy machine may not get there in time: again, later
            elif life.status == 1:
                # It gave up as the server was away; a supervisor starts it again, and so does this test.
                self.gave_up(name)
                chosen.append(point)
            else:
                assert life.status == -signal.SIGKILL, f"{name} ended with {life.status} at {life.where}"
                self.deaths.at[name, point] += 1

        while True:
            life = self.last[name] = self.nursery.begin(name)
            last.set()
            await life.ended.wait()
            if life.status != 1:
                return
            self.gave_up(name)

    def gave_up(self, name: str) -> None:
        self.deaths.gave_up[name] += 1
        assert self.deaths.gave_up.total() <= self.may_give_up, (
            f"{name} ends by itself: {self.deaths.gave_up}"
        )

    async def stop(self) -> None:
        """Ask every service to end, as a supervisor does."""
        for name, life in self.last.items():
            assert life.status is None, f"{name} ended by itself with {life.status}"
            with anyio.fail_after(30):
                assert await life.end(signal.SIGTERM) == 0, name


async def throw_garbage(broker: Broker) -> None:
    """Publish a message that is not an event on each stream from time to time. It must become a dead letter and stop no
    service."""
    subjects = (
        "rollout.exchange.p.garbage{}",
        "policy.checkpoint.p.tiny.9{}",
        "group.discarded.p.tiny.garbage{}",
    )
    for i in range(100_000):
        # Seldom where every start reads from the beginning: each life finds all of it again.
        subject = subjects[0 if i % 10 else 1 + i // 10 % 2].format(i)
        await broker.publish_raw(subject, GARBAGE, {}, message_id=f"garbage{i}")
        await anyio.sleep(0.5)


async def settled(broker: Broker) -> None:
    """Until every event is acknowledged, but for groups that are too few for a step."""
    while True:
        groups = await read_stream(broker, "GROUPS")
        done = {r.event.group for r in groups if isinstance(r.event, GroupDiscarded)}
        done |= {g for c in await checkpoints(broker) for g in c.groups}
        scored = {r.event.group for r in groups if isinstance(r.event, GroupScored)}
        waiting = await broker.lag("store-") + await broker.lag("judge")
        if not waiting and len(scored - done) < 2:
            return
        await anyio.sleep(0.2)


async def checkpoints(broker: Broker) -> list[CheckpointPublished]:
    history = await broker.read(CheckpointPublished)
    return [r.event for r in history]


async def in_log(broker: Broker) -> dict[tuple[str, int], bytes]:
    """(stream, sequence) and payload of every message that is an event."""
    found: dict[tuple[str, int], bytes] = {}
    for spec in streams.STREAMS:
        info = await broker.js.stream_info(spec.name)
        async for seq, _, _, payload in broker.messages(spec.name, 1, info.state.last_seq):
            if payload != GARBAGE:
                decode(payload)
                found[spec.name, seq] = payload
    return found


@asynccontextmanager
async def agents(config: Config) -> AsyncIterator[Fleet]:
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        fleet = Fleet(f"http://127.0.0.1:{config.gateway.port}", client)
        async with anyio.create_task_group() as tg:
            for lane in range(LANES):
                tg.start_soon(fleet.work, lane)
            yield fleet
            fleet.stopping = True


def violations(log: str) -> list[str]:
    """Return the lines of a NATS server's log that say that a connection or a right was refused."""
    words = ("violation", "authentication error")
    return [line for line in log.splitlines() if any(word in line.lower() for word in words)]


def guarded(folder: Path) -> str:
    """Return the users of a NATS server, as its configuration has them. Their seeds lie in `keys` below `folder`."""
    return users.authorization(folder / "keys")


def settings(nats: NatsConfig, base: str, folder: Path) -> Config:
    """The settings of all services, without the inference server's address. The NATS server has the users of
    `guarded`."""
    keys = folder / "keys"
    nats = msgspec.structs.replace(nats, users=str(keys), provision=False)
    return signing.with_public_key(Config(
        project="p", run_dir=str(folder), nats=nats, models=(ModelConfig(name="tiny", base=base),),
        signing=SigningConfig(seed=str(keys / "checkpoints.nk")),
        vllm=VllmConfig(max_loras=10),
        gateway=GatewayConfig(port=free_port(), max_groups_ahead=16, replicas=ReplicasConfig(health_interval_s=0.5)),
        judge=JudgeConfig(group_size=GROUP),
        trainer=TrainerConfig(
            groups_per_step=2, max_staleness=8, check_sequences=0, logprob_bound=1e9, lora=LoraConfig(rank=4),
            optimizer=OptimizerConfig(learning_rate=1e-3), memory=MemoryConfig(tokens_per_batch=1024),
        ),
        store=StoreConfig(flush_rows=40, flush_s=0.05, compact_s=0.1, compact_files=3, compact_grace_s=0.0),
    ))  # fmt: skip


async def play(
    config: Config,
    lives: Mapping[str, int],
    kill_servers: Callable[[], Awaitable[int]],
    *,
    may_give_up: int = 0,
    least: tuple[int, int] = (200, 50),
) -> Matrix:
    """Services live and die while agents work and `kill_servers` runs, which returns how many it killed; then
    everything is checked. `least`: so many runs must have ended and so many steps been taken."""
    folder = config.path()
    operator = msgspec.structs.replace(config.nats, provision=True)
    async with Broker.connect(operator) as broker, Upstream(SEED, kit.VOCAB).run() as upstream:
        assert isinstance(upstream, Upstream)
        vllm = VllmConfig(urls=(upstream.url.removesuffix("/v1"),), max_loras=10)
        config = msgspec.structs.replace(config, vllm=vllm)
        configuration.save(config, folder / "config.toml")
        nursery = Nursery(folder / "config.toml")
        try:
            async with anyio.create_task_group() as listening:
                listening.start_soon(nursery.listen)
                await nursery.imported()
                matrix = Matrix(nursery, lives, may_give_up)
                async with anyio.create_task_group() as services:
                    scheduled = [await services.start(matrix.service, name) for name in SERVICES]
                    async with anyio.create_task_group() as noise:
                        noise.start_soon(throw_garbage, broker)
                        async with agents(config) as fleet:
                            matrix.deaths.at["nats", "anywhere"] += await kill_servers()
                            for event in scheduled:
                                await event.wait()
                        noise.cancel_scope.cancel()
                    with anyio.fail_after(60):
                        await settled(broker)
                    await matrix.stop()
                listening.cancel_scope.cancel()
        finally:
            nursery.close()
        assert fleet.repeated > lives["gateway"]
        await check(broker, config, fleet, upstream, least)
    return matrix


async def check(
    broker: Broker, config: Config, fleet: Fleet, upstream: Upstream, least: tuple[int, int]
) -> None:
    """Check that log and files agree with each other and with what the agents received."""
    log = await in_log(broker)
    found = stored_events(LocalTarget(config.path("store")))
    assert {k: n for k, n in found.items() if n != 1} == {}
    assert set(found) == set(log)
    assert not list(config.path("store").glob("*/.tmp-*"))
    events = [await broker.decode(payload) for payload in log.values()]

    # What agents were answered is on the log, once, with the tokens that were sampled.
    exchanges = [e for e in events if isinstance(e, ExchangeRecorded)]
    assert Counter((e.trajectory, e.seq) for e in exchanges) == Counter(fleet.replies.keys())
    for e in exchanges:
        reply = fleet.replies[e.trajectory, e.seq]
        assert json.loads(e.response)["id"] == reply
        assert unpack_ids(e.sampled_ids).tolist() == upstream.said[reply]
    completed = Counter(e.trajectory for e in events if isinstance(e, TrajectoryCompleted))
    assert completed == Counter(fleet.finished)
    assert len(fleet.finished) > least[0]

    # Each group is scored once with all its members; it is trained once, discarded once, or waits for another.
    scored = [e for e in events if isinstance(e, GroupScored)]
    assert Counter(m.trajectory for e in scored for m in e.members) == completed
    assert Counter(e.group for e in scored) == Counter({t.rpartition("-")[0] for t in fleet.finished})
    steps = sorted((e for e in events if isinstance(e, CheckpointPublished)), key=lambda e: e.step)
    assert [e.step for e in steps] == list(range(1, len(steps) + 1)), "a step is missing or doubled"
    assert [e.parent for e in steps] == [f"tiny@{i}" for i in range(len(steps))]
    ends = Counter(g for e in steps for g in e.groups)
    ends.update(e.group for e in events if isinstance(e, GroupDiscarded))
    assert set(ends.values()) == {1}, "a group trained twice, or trained and discarded"
    assert len({e.group for e in scored} - set(ends)) < 2
    assert len(steps) > least[1]
    trust = signing.Trust(config.signing)
    assert trust.checks
    assert [objection for e in steps if (objection := trust.objection(e))] == []
    assert {e.reason for e in events if isinstance(e, DeadLettered)} <= {"undecodable"}

    # The newest version is served, and its delivery is on the log.
    assert f"tiny@{len(steps)}" in upstream.adapters
    assert any(isinstance(e, PolicyLoaded) and e.step == len(steps) for e in events)

    # SQL says the same.
    with sql.connect(config) as connection:
        counted = connection.sql("SELECT count(*), count(DISTINCT trajectory) FROM trajectories").fetchall()
        assert counted == [(len(fleet.finished), len(fleet.finished))]
        trained = connection.sql("SELECT count(*), count(DISTINCT group_id) FROM lineage").fetchall()
        groups = sum(len(e.groups) for e in steps)
        assert trained == [(groups * GROUP * TURNS, groups)]
