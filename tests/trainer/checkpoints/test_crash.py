"""Killed at every point of the commit protocol: the run ends as if nothing had happened."""

import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline import config as configuration
from pipeline.config import Config, NatsConfig
from pipeline.events import Hint, unpack_seqs
from pipeline.log.broker import Broker
from tests.conftest import NatsServer
from tests.trainer import kit
from tests.trainer.crash_child import DIED, POINTS
from tests.trainer.distillation import kit as hinted
from trainer.checkpoints import checkpoint
from trainer.checkpoints.tensors import weights_of

pytestmark = [  # each starts the trainer again and again
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("quick_redelivery"),
    pytest.mark.slow,
]


class Lives:
    """A process that forks trainers: it has imported PyTorch."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def live(self, config: Config, point: str = "none", nth: int = 1, longest: int = 10**6) -> int:
        """One life of the trainer; its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        path = Path(config.run_dir) / "config.toml"
        configuration.save(config, path)
        self._process.stdin.write(f"{path} {point} {nth} {longest}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    command = [sys.executable, "-m", "tests.trainer.crash_child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Lives(process)
        assert process.stdin is not None
        process.stdin.close()


def run(base: str, folder: Path, nats: NatsConfig, steps: int, **changed: object) -> Config:
    return kit.with_many_loras(
        kit.settings(base, folder, nats, max_steps=steps, max_staleness=100, keep_checkpoints=2, **changed)
    )


async def fill(broker: Broker, groups: int, *, hints: bool) -> None:
    """`hints`: groups are single runs, each with a hint and without a reward."""
    rng = np.random.default_rng(0)
    for i in range(groups):
        if hints:
            await hinted.publish(broker, f"g{i}", (Hint(call=i % 2, text=str(5 + i)),), seed=i)
            continue
        rewards = [0.5] * 2 if i % 7 == 3 else rng.random(2).tolist()
        await kit.publish_group(broker, f"g{i}", rewards, seed=i)
        if i % 3 == 0:  # people's labels later became a verdict set of their own
            await broker.publish(kit.group(f"g{i}", rewards[::-1], judge="labels", offline=True, origin=f"main/{i}"))


@asynccontextmanager
async def killed(
    lives: Lives,
    start_nats: Callable[..., NatsServer],
    base: str,
    folder: Path,
    steps: int,
    groups: int,
    **changed: object,
) -> AsyncIterator[Callable[..., int]]:
    """Lives of a trainer over `groups` groups. At the end it runs undisturbed, and has to reach the steps and weights
    of a run that nothing interrupted."""
    trained, weights = [], []
    for name in ("whole", "killed"):
        nats = NatsConfig(url=start_nats().url, ack_timeout_s=60)
        config = run(base, folder / name, nats, steps, **changed)
        async with Broker.connect(nats) as broker:
            await fill(broker, groups, hints="distill.weight" in changed)
            if name == "killed":
                yield partial(lives.live, config)
            assert lives.live(config) == 0
            events, discards = await kit.checkpoints(broker), await kit.discards(broker)
        assert [e.step for e in events] == list(range(1, steps + 1))
        seqs = [seq for e in events for seq in unpack_seqs(e.group_seqs).tolist()]
        assert len(seqs) == len(set(seqs))
        assert len({(d.group, d.judge) for d in discards}) == len(discards)
        trained.append([e.groups for e in events])
        weights.append(weights_of(checkpoint.Checkpoints.of(config, kit.MODEL).read(steps)[1]))
    assert trained[0] == trained[1]
    exact = bool({"distill.weight", "loss.baseline"} & changed.keys())
    torch.testing.assert_close(weights[1], weights[0], rtol=0 if exact else 1e-5, atol=0 if exact else 1e-7)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="one update a step"),
        pytest.param({"optimizer.epochs": 2, "optimizer.minibatches": 2}, id="four updates a step"),
        pytest.param({"loss.baseline": "task", "loss.advantage_scaling": "none"}, id="compared with earlier runs"),
    ],
)
async def test_killed_at_every_point_of_the_commit(
    lives: Lives, start_nats: Callable[..., NatsServer], tiny_base: str, tmp_path: Path, settings: dict[str, object]
) -> None:
    async with killed(lives, start_nats, tiny_base, tmp_path, 11, 22, **settings) as live:
        # With the group as baseline, four groups are discarded and acknowledged: the fifth is in the middle of a
        # batch's.
        assert live("broker.after_ack", 5) == DIED
        for point in POINTS:
            assert live(point, 2) == DIED, point


async def test_a_step_with_hints_is_the_same_bit_for_bit_after_a_death(
    lives: Lives, start_nats: Callable[..., NatsServer], tiny_base: str, tmp_path: Path
) -> None:
    """Each hint is learned from once, and the average that teaches is part of the checkpoint."""
    base = hinted.chat_base(tiny_base, tmp_path / "base")
    distil: dict[str, object] = {
        "distill.weight": 1.0,
        "distill.divergence": "reverse_kl",
        "distill.teacher": "average",
    }
    async with killed(lives, start_nats, base, tmp_path, 4, 8, **distil) as live:
        for point in ("trainer.after_checkpoint", "trainer.after_publish", "committed"):
            assert live(point) == DIED, point


@pytest.mark.parametrize("point", ["trainer.after_checkpoint", "trainer.after_publish", "committed"])
async def test_a_too_large_trajectory_is_discarded_once_at_whatever_point_the_trainer_dies(
    lives: Lives, start_nats: Callable[..., NatsServer], tiny_base: str, tmp_path: Path, point: str
) -> None:
    """Regression: a trainer that died between a step's commit and the event never published it."""
    nats = NatsConfig(url=start_nats().url, ack_timeout_s=60)
    config = kit.with_many_loras(
        kit.settings(tiny_base, tmp_path, nats, groups_per_step=1, max_steps=1, **{"memory.packing": "padded"})
    )
    async with Broker.connect(nats) as broker:
        for i in range(2):
            for event in kit.turns(f"g-{i}", i):
                await broker.publish(event)
        for turn, prompt in enumerate(([5] * 80, [5] * 80 + [6, 7, 8])):
            await broker.publish(kit.exchange("g-2", turn, prompt, [6, 7]))
        await broker.publish(kit.group("g", [0.0, 1.0, 0.5]))
        assert lives.live(config, point, longest=70) == DIED
        assert [lives.live(config, longest=70) for _ in range(2)] == [0, 0]
        (step,) = await kit.checkpoints(broker)
        (told,) = await kit.discards(broker)
        assert step.metrics["sequences_dropped"] == 1
        assert (told.reason, told.trajectories, told.version) == ("too_large", ("g-2",), "tiny@1")
