"""The crash matrix: services that die at seeded stop points while agents work, and what must hold in the end.

Gateway, judge, trainer, store and nats-server run together as processes of their own. Each process of a service is told
at which stop point of `pipeline/crash.py` to die, and at which passage; the server is killed at seeded times. The
inference server is a small one in this process that speaks vLLM's API: it stays up, so that what it answers can be
compared with what was recorded.

As under `journeywork up`, every service has its own NATS user with the rights of `pipeline/security/users.py`, the
trainer signs its checkpoints and the gateway serves no others."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskStatus

from pipeline import config as configuration
from pipeline.config import Config, JudgeConfig, ModelConfig, NatsConfig, RewardConfig, SigningConfig, VllmConfig
from pipeline.log.broker import Broker
from pipeline.security import signing, users
from tests.conftest import free_port
from tests.kits.crash.agents import GROUP, SEED, working
from tests.kits.crash.checks import GARBAGE, check, settled
from tests.kits.crash.fork_server import SERVICES
from tests.kits.crash.points import POINTS
from tests.kits.crash.processes import ForkServer, ServiceProcess, fork_server
from tests.kits.settings import with_values
from tests.kits.upstream import Upstream
from tests.trainer import kit

PATIENCE_S, PATIENCE_CALLS = 12.0, 40
"""A process that does not pass its stop point is killed after so many seconds and, on a slow machine, not before the
agents have been answered so many calls: what it passes depends on their work, not on the clock."""
LONGEST_S = 90.0
"""The longest that a process has, also while the agents are not answered."""
MISSES = 3
"""Number of processes of a service that may miss a stop point before the point is skipped."""

REWARDS = (RewardConfig(name="agent"), RewardConfig(name="grade", kind="feedback", default=0.0))
"""The mean of what an agent reports and of the feedback, for which a group waits."""

_PUBLISHES = ("broker.before_publish", "broker.after_publish")
_ACKS = ("broker.before_ack", "broker.after_ack")
_UPLOADS = ("broker.before_upload",)


_ELSEWHERE = ("judge.teacher_answered", "judge.healing_compared")
"""Points that no process of the matrix passes: neither a teacher nor healing is set here. tests/judge/test_teacher.py
and test_healing.py die at them."""


def points_of(service: str) -> list[str]:
    """The stop points that a service passes: its own, and those of the broker that it uses."""
    shared = {
        "gateway": (*_PUBLISHES, *_UPLOADS, "broker.after_claim"),
        "sampler": _PUBLISHES,
        "judge": (*_PUBLISHES, *_ACKS),
        "trainer": (*_PUBLISHES, *_ACKS, *_UPLOADS),
        "store": _PUBLISHES,
    }
    own = [p for p in POINTS if p.startswith(f"{service}.") and p not in _ELSEWHERE]
    return own + list(shared[service])


@dataclass(eq=False)
class Endings:
    """How the processes ended, counted."""

    at: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(service, stop point) to the endings there."""
    elsewhere: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Killed by this test, as its stop point was not passed in time."""

    gave_up: Counter[str] = field(default_factory=Counter)
    """Exited by themselves, with an error, while the server was away."""

    def __len__(self) -> int:
        return self.at.total() + self.elsewhere.total()


class Matrix:
    """Runs the services through their schedules of endings."""

    def __init__(
        self, fork_server: ForkServer, upstream: Upstream, deaths: Mapping[str, int], may_give_up: int = 0
    ) -> None:
        """`deaths` is how often each service dies. `may_give_up` is the number of exits with an error that are allowed
        in all."""
        self.fork_server, self.upstream = fork_server, upstream
        self.deaths, self.may_give_up = deaths, may_give_up
        self.endings = Endings()
        self.last: dict[str, ServiceProcess] = {}
        """By service, the process that is not killed."""

    async def service(self, name: str, *, task_status: TaskStatus[anyio.Event]) -> None:
        """Start as many processes as the service has deaths, each of which dies at a seeded point, and then one that
        runs until it is stopped. The event is set when the last one has begun."""
        last = anyio.Event()
        task_status.started(last)
        rng = random.Random(f"{SEED}/{name}")
        points = points_of(name)
        chosen = [points[i % len(points)] for i in range(self.deaths[name])]
        rng.shuffle(chosen)
        while chosen:
            point = chosen.pop()
            often = 12 if point in (*_PUBLISHES, *_ACKS, "gateway.before_answer") else 2
            process = self.fork_server.start(name, f"{point}:{rng.randint(1, often)}")
            await self.patience(process)
            if process.status is None:
                await process.end(signal.SIGKILL)
                self.endings.elsewhere[name, point] += 1
                if self.endings.elsewhere[name, point] < MISSES:
                    chosen.insert(0, point)  # a busy machine may not get there in time: again, later
            elif process.status == 1:
                # It gave up as the server was away; a supervisor starts it again, and so does this test.
                self.gave_up(name)
                chosen.append(point)
            else:
                assert process.status == -signal.SIGKILL, f"{name} ended with {process.status} at {process.where}"
                self.endings.at[name, point] += 1

        while True:
            process = self.last[name] = self.fork_server.start(name)
            last.set()
            await process.ended.wait()
            if process.status != 1:
                return
            self.gave_up(name)

    async def patience(self, process: ServiceProcess) -> None:
        """Wait until the process has ended, or for as long as it has."""
        enough = len(self.upstream.said) + PATIENCE_CALLS
        with anyio.move_on_after(LONGEST_S):
            with anyio.move_on_after(PATIENCE_S):
                await process.ended.wait()
            while process.status is None and len(self.upstream.said) < enough:
                with anyio.move_on_after(0.2):
                    await process.ended.wait()

    def gave_up(self, name: str) -> None:
        self.endings.gave_up[name] += 1
        assert self.endings.gave_up.total() <= self.may_give_up, f"{name} ends by itself: {self.endings.gave_up}"

    async def stop(self) -> None:
        """Ask every service to end, as a supervisor does."""
        for name, process in self.last.items():
            assert process.status is None, f"{name} ended by itself with {process.status}"
            with anyio.fail_after(60):
                assert await process.end(signal.SIGTERM) == 0, name


async def throw_garbage(broker: Broker) -> None:
    """Publish a message that is not an event on each stream from time to time. It must become a dead letter and stop no
    service."""
    subjects = ("rollout.exchange.p.garbage{}", "policy.checkpoint.p.tiny.9{}", "group.discarded.p.tiny.garbage{}")
    for i in range(100_000):
        # Seldom where every start reads from the beginning: each process finds all of it again.
        subject = subjects[0 if i % 10 else 1 + i // 10 % 2].format(i)
        await broker.publish_raw(subject, GARBAGE, {})
        await anyio.sleep(0.5)


def violations(log: str) -> list[str]:
    """Return the lines of a NATS server's log that say that a connection or a right was refused."""
    words = ("violation", "authentication error")
    return [line for line in log.splitlines() if any(word in line.lower() for word in words)]


def server_users(folder: Path) -> str:
    """Return the users of a NATS server, as its configuration has them. Their seeds lie in `keys` below `folder`."""
    return users.authorization(folder / "keys")


def settings(nats: NatsConfig, base: str, folder: Path) -> Config:
    """The settings of all services, without the inference server's address. The NATS server has the users of
    `server_users`."""
    keys = folder / "keys"
    nats = msgspec.structs.replace(nats, users=str(keys), provision=False)
    config = Config(
        project="p",
        run_dir=str(folder),
        nats=nats,
        models=(ModelConfig(name="tiny", base=base),),
        signing=signing.trusting_own_key(SigningConfig(seed=str(keys / "checkpoints.nk"))),
        judge=JudgeConfig(group_size=GROUP, rewards=REWARDS),
    )
    gateway = {"gateway.port": free_port(), "gateway.max_groups_ahead": 16, "gateway.replicas.health_interval_s": 0.5}
    steps = {"trainer.groups_per_step": 2, "trainer.max_staleness": 8, "trainer.check_share": 0.0}
    tiny = {"trainer.logprob_bound": 1e9, "trainer.lora.rank": 4, "trainer.optimizer.learning_rate": 1e-3}
    store = {"flush_rows": 40, "flush_s": 0.05, "compact_s": 0.1, "compact_files": 3, "compact_grace_s": 0.0}
    others = {"feedback.wait_s": 30.0, "trainer.memory.tokens_per_batch": 1024, "vllm.max_loras": 10}
    return with_values(config, {**gateway, **steps, **tiny, **{f"store.{n}": v for n, v in store.items()}, **others})


async def run_matrix(
    config: Config,
    deaths: Mapping[str, int],
    kill_servers: Callable[[], Awaitable[int]],
    *,
    may_give_up: int = 0,
    least: tuple[int, int],
) -> Matrix:
    """Let services die while agents work and `kill_servers` runs, which returns how many it killed; then check
    everything. `least`: so many runs must have ended and so many steps been taken."""
    folder = config.path()
    operator = msgspec.structs.replace(config.nats, provision=True)
    async with Broker.connect(operator) as broker, Upstream(SEED, kit.VOCAB).run() as upstream:
        assert isinstance(upstream, Upstream)
        vllm = VllmConfig(urls=(upstream.url.removesuffix("/v1"),), max_loras=10)
        config = msgspec.structs.replace(config, vllm=vllm)
        configuration.save(config, folder / "config.toml")
        async with fork_server(folder / "config.toml") as forks, anyio.create_task_group() as services:
            matrix = Matrix(forks, upstream, deaths, may_give_up)
            scheduled = [await services.start(matrix.service, name) for name in SERVICES]
            async with anyio.create_task_group() as noise:
                noise.start_soon(throw_garbage, broker)
                async with working(config) as agents:
                    matrix.endings.at["nats", "anywhere"] += await kill_servers()
                    for event in scheduled:
                        await event.wait()
                noise.cancel_scope.cancel()
            with anyio.fail_after(400):  # beside other tests, the last deliveries take a while
                await settled(broker)
            await matrix.stop()
        assert agents.repeated > deaths["gateway"]
        await check(broker, config, agents, upstream, least)
    return matrix
