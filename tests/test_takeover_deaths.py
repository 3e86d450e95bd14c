"""A take-over in whose middle every service is killed while agents go on calling: each step is decided once, every run
has the share that was in force when it opened, and no acknowledged run is lost.

`journeywork decide check` may find a difference then: a look while the store is dead sees fewer runs than came."""

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.to_thread
import httpx
import msgspec
import pytest

from pipeline import config as configuration
from pipeline import streams
from pipeline.config import Config, JudgeConfig, NatsConfig, OutsideConfig, RewardConfig, VllmConfig
from pipeline.events import (
    CheckpointPublished,
    DeadLettered,
    ExchangeRecorded,
    PolicyLoaded,
    PolicyPromoted,
    TrajectoryCompleted,
    TrajectoryOpened,
)
from pipeline.log.broker import Broker
from pipeline.names import split_point
from pipeline.running.installations import SETTINGS
from store.lake.lake import lake_in
from store.reading import sql
from tests.conftest import NatsServer
from tests.kits.crash.agents import GROUP, SEED, Agents
from tests.kits.crash.checks import in_log
from tests.kits.crash.fork_server import ACK_WAIT_S, SERVICES
from tests.kits.crash.matrix import server_users, settings, violations
from tests.kits.crash.processes import ForkServer, ServiceProcess, fork_server
from tests.kits.quick_service import quick_consumers
from tests.kits.upstream import Upstream
from tests.kits.waiting import until_true
from tests.rollout_gateway.outside.provider import Provider, completion, providing, whole
from tests.store.kit import stored_events
from tests.trainer import kit
from tests.trainer.conftest import tiny_base as tiny_base

MASTER, APPRENTICE = "outside:master", "tiny@1"
PLAN = ("--steps", "40,50,60", "--metric", "reward", "--margin", "0.5", "--alpha", "0.4", "--deadline", "1e6")
BEGUN, RAISED, AGAIN = (("split", APPRENTICE, percent) for percent in (40.0, 50.0, 60.0))
PROMOTED = ("promote", APPRENTICE, 100.0)
LANES = 2
_DECIDE = (
    "import sys; from store.evidence import decide; decide._SETTLED_S = 10; raise SystemExit(decide.main(sys.argv[1:]))"
)


class Callers(Agents):
    """Agents in groups, of one call each. The apprentice's runs get better rewards than the master's."""

    def __init__(self, url: str, client: httpx.AsyncClient, log: Path) -> None:
        super().__init__(url, client, log)
        self.sent: dict[str, float] = {}
        """Run to the time, in seconds since 1970, at which its opening was first asked for."""
        self.places = anyio.Semaphore(LANES)
        """One for each group that is played."""
        self.groups = 0
        """Finished ones."""

    async def play(self, group: str, attempt: int, model: str) -> None:
        name = f"{group}-{attempt}"
        self.sent[name] = time.time()
        opened = await self.post("/v1/trajectories", {"model": model, "group": group, "attempt": attempt, "id": name})
        body = {"model": model, "messages": [{"role": "user", "content": group}], "max_tokens": 3}
        reply = await self.post(f"/t/{name}/v1/chat/completions", body, opened["api_key"])
        self.replies[name, 0] = reply["model"]
        reward = 0.8 * reply["model"].startswith("tiny") + 0.1 * attempt
        await self.post(f"/v1/trajectories/{name}/complete", {"reward": reward})
        self.finished[name] = reward

    async def group(self, name: str, model: str) -> None:
        async with anyio.create_task_group() as tg:
            for attempt in range(GROUP):
                tg.start_soon(self.play, name, attempt, model)

    async def work(self, lane: int) -> None:
        index = 0
        while not self.stopping:
            async with self.places:
                await self.group(f"g{lane}.{index}", "master")
            index, self.groups = index + 1, self.groups + 1

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No group is played within the block."""
        for _ in range(LANES):
            await self.places.acquire()
        yield
        for _ in range(LANES):
            self.places.release()

    async def more(self, groups: int) -> None:
        """Wait until so many further groups are finished."""
        enough = self.groups + groups
        await until_true(lambda: self.groups >= enough, 120)


class Installation:
    """Services that are killed, and the decisions about the master."""

    def __init__(self, config: Config, forks: ForkServer, broker: Broker, server: NatsServer) -> None:
        self.config, self.forks, self.broker, self.server = config, forks, broker, server
        self.running: dict[str, ServiceProcess] = {}

    async def start(self, name: str, where: str = "") -> None:
        self.running[name] = self.forks.start(name, where)
        with anyio.fail_after(120):
            await self.running[name].ready.wait()

    async def kill(self, name: str, where: str = "") -> None:
        """As `kill -9`, and start it again, to die at the stop point `where`."""
        if name == "nats":
            self.server.kill()
            await anyio.to_thread.run_sync(self.server.start)
            return
        assert await self.running[name].end(signal.SIGKILL) == -signal.SIGKILL, f"{name} had ended by itself"
        await self.start(name, where)

    async def stop(self, name: str) -> None:
        with anyio.fail_after(60):
            assert await self.running[name].end(signal.SIGTERM) == 0, name

    async def decide(self, *args: str, crash_at: str = "") -> int:
        """Run `journeywork decide` as a process; return its exit status."""
        folder = str(self.config.path())
        url = ["--url", f"http://127.0.0.1:{self.config.gateway.port}"]
        command = [sys.executable, "-c", _DECIDE, *args, "--run-dir", folder, *([] if args[0] == "check" else url)]
        environment = {**os.environ, "JOURNEYWORK_CRASH": crash_at}
        done = await anyio.run_process(command, env=environment, check=False)
        sys.stdout.write(f"decide {' '.join(args)}: {done.returncode}\n{done.stdout.decode()}{done.stderr.decode()}")
        return done.returncode

    async def decisions(self) -> list[tuple[str, str, float]]:
        history = await self.broker.read(PolicyPromoted)
        return [(r.event.action, r.event.version, r.event.percent) for r in history]

    async def until_shown(self) -> None:
        """Watch until the results decide, and die before it is said."""
        with anyio.fail_after(180):
            while (status := await self.decide("watch", "master", "--once", crash_at="decide.before_publish")) == 3:
                pass
        assert status == -signal.SIGKILL

    async def until_written(self) -> None:
        """Until judge and store have read everything."""
        with anyio.fail_after(120):
            while await self.broker.lag("judge") + await self.broker.lag("store-"):
                await anyio.sleep(0.1)


@asynccontextmanager
async def installed(config: Config, server: NatsServer, provider: Provider) -> AsyncIterator[Installation]:
    operator = msgspec.structs.replace(config.nats, provision=True)
    async with Broker.connect(operator) as broker, Upstream(SEED, kit.VOCAB).run() as upstream:
        vllm = VllmConfig(urls=(upstream.url.removesuffix("/v1"),), max_loras=10)
        master = OutsideConfig(name="master", url=provider.url, output_usd=10.0, apprentice="tiny")
        judge = JudgeConfig(group_size=GROUP, rewards=(RewardConfig(name="agent"),))
        store = msgspec.structs.replace(config.store, compact_grace_s=600.0)  # a look at the history takes a while
        config = msgspec.structs.replace(config, vllm=vllm, outside=(master,), judge=judge, store=store)
        configuration.save(config, config.path(SETTINGS))
        async with fork_server(config.path(SETTINGS)) as forks:
            made = Installation(config, forks, broker, server)
            for name in SERVICES:
                await made.start(name)
            yield made


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_takeover_survives_the_death_of_each_service(
    start_nats: Callable[..., NatsServer], tiny_base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CONSUMERS", quick_consumers(ACK_WAIT_S, endless=True))
    server = start_nats(max_payload=32_768, extra=server_users(tmp_path))
    nats = NatsConfig(url=server.url, connect_timeout_s=60, publish_deadline_s=60, ack_timeout_s=2.0)
    rng = random.Random(SEED)
    with providing() as provider:
        provider.says(whole(completion()))
        async with (
            installed(settings(nats, tiny_base, tmp_path), server, provider) as here,
            httpx.AsyncClient(timeout=60) as client,
        ):
            agents = Callers(f"http://127.0.0.1:{here.config.gateway.port}", client, here.config.path("gateway.log"))
            for number in range(2):  # a step of the trainer
                await agents.group(f"before.{number}", "tiny")
            with anyio.fail_after(120):
                while not await here.broker.read(PolicyLoaded, project="p"):
                    await anyio.sleep(0.1)
            await here.until_written()  # a trainer on a quiet machine is faster than the store
            assert await here.decide("begin", APPRENTICE, MASTER, *PLAN) == 0

            async def all_die() -> None:
                for name in rng.sample((*SERVICES, "nats"), len(SERVICES) + 1):
                    await here.kill(name)
                    await agents.more(1)

            async with anyio.create_task_group() as tg:
                for lane in range(LANES):
                    tg.start_soon(agents.work, lane)
                await agents.more(1)
                await all_die()
                await here.until_shown()
                assert await here.decisions() == [BEGUN]
                async with agents.paused():  # the next event of the gateway is the decision
                    await here.kill("gateway", "broker.after_publish")
                    assert await here.decide("watch", "master", "--once") == 1
                    assert await here.decisions() == [BEGUN, RAISED]
                    await here.running["gateway"].ended.wait()
                    await here.start("gateway")
                await agents.more(1)
                await all_die()
                await here.until_shown()
                assert await here.decisions() == [BEGUN, RAISED]
                async with anyio.create_task_group() as deciding:
                    server.kill()
                    deciding.start_soon(here.decide, "watch", "master", "--once")
                    await anyio.sleep(rng.uniform(2.0, 5.0))  # the schedule: when it is there again
                    await anyio.to_thread.run_sync(server.start)
                while await here.decisions() == [BEGUN, RAISED]:
                    await here.decide("watch", "master", "--once")
                assert await here.decisions() == [BEGUN, RAISED, AGAIN]
                async with anyio.create_task_group() as deciding:
                    watched = []

                    async def watch() -> None:
                        watched.append(await here.decide("watch", "master", "--every", "0.5"))

                    deciding.start_soon(watch)
                    await all_die()
                assert watched == [0]
                await all_die()
                assert await here.decide("watch", "master", "--once") == 2  # it is over
                agents.stopping = True
            await agents.group("last", "master")
            for name in ("gateway", "sampler", "trainer"):
                await here.stop(name)
            await here.until_written()
            for name in ("judge", "store"):
                await here.stop(name)
            assert await here.decisions() == [BEGUN, RAISED, AGAIN, PROMOTED]
            await check(here, agents)
    assert violations(server.log) == []


async def check(here: Installation, agents: Callers) -> None:
    log = await in_log(here.broker)
    found = stored_events(lake_in(here.config.path("store")))
    assert set(found.values()) == {1}
    assert set(found) == set(log)
    events = [await here.broker.decode(payload) for payload in log.values()]
    assert not [e for e in events if isinstance(e, DeadLettered)]

    # What agents were told is on the log, once.
    answered = [e for e in events if isinstance(e, ExchangeRecorded) and e.status == "complete"]
    assert Counter((e.trajectory, e.seq) for e in answered) == Counter(agents.replies.keys())
    completed = [e for e in events if isinstance(e, TrajectoryCompleted)]
    assert Counter(e.trajectory for e in completed) == Counter(agents.finished.keys())
    assert {e.trajectory: e.reward for e in completed} == agents.finished
    trained = Counter(g for e in events if isinstance(e, CheckpointPublished) for g in e.groups)
    assert set(trained.values()) == {1}

    # Each run has a share that was in force while its opening was asked for.
    shares = [(r.place.at, r.event.percent) for r in await here.broker.read(PolicyPromoted)]
    sides = Counter[bool]()
    for opening in await here.broker.read(TrajectoryOpened, project="p"):
        opened = opening.event
        if opened.asked:
            sent = agents.sent[opened.trajectory] * 1e6
            in_force = [percent for at, percent in shares if at <= sent][-1:]
            in_force += [percent for at, percent in shares if sent < at <= opening.place.at]
            own = opened.pinned == APPRENTICE
            assert own in {split_point(opened.group) < percent for percent in in_force}, opened
            sides[own] += 1
    assert sides.total() == len(agents.finished) - 2 * GROUP
    assert min(sides.values()) > 5

    # The history has each acknowledged run once.
    with sql.connect(here.config) as connection:
        query = "SELECT trajectory, reward FROM takeovers WHERE model = 'master' AND outcome = 'scored'"
        rows = connection.sql(query).fetchall()
    assert len(rows) == sides.total()
    assert dict(rows).items() <= agents.finished.items()
