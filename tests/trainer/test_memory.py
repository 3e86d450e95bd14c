"""The trainer's memory does not grow with the groups and steps that lie behind it.

`JOURNEYWORK_TEST_MEMORY_ROUNDS=40 pytest tests/trainer/test_memory.py -n 0 -s` prints the figures of a longer run."""

import gc
import itertools
import os
import statistics
import tracemalloc
from pathlib import Path

import anyio
import msgspec
import pytest

from pipeline.config import RetentionConfig
from pipeline.events import CheckpointPublished
from pipeline.log.broker import Broker
from pipeline.names import subject_token
from tests.trainer import kit

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("JOURNEYWORK_TEST_MEMORY_ROUNDS", "6"))
STEPS, DISCARDED = 8, 50
"""Steps of a round, and groups of equal rewards that come with each of them."""
BYTES_PER_GROUP = 100
"""What a group may leave behind. Its id alone takes 60 bytes, its place in the log 150."""


async def _step(broker: Broker, n: int) -> None:
    """Let the trainer take a step over one group, with discarded groups and a validation group beside it."""
    for i in range(DISCARDED):
        await broker.publish(kit.group(f"flat-{n}-{i}", [1.0] * 4, step=n))
    await broker.publish(kit.group(f"val-{n}", [0.5] * 4, step=n, split="val"))
    await kit.publish_group(broker, f"train-{n}", [0.0, 1.0], seed=n, step=n)
    keys = {"project": "p", "model": kit.MODEL, "step": n + 1}
    with anyio.fail_after(60):
        while await broker.read_last(CheckpointPublished, **keys) is None:
            await anyio.sleep(0.01)


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.timeout(3600)
async def test_memory_does_not_grow_with_groups_and_steps(
    settings: kit.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.intake._CONSUMED_KEPT", 100)
    config = settings(groups_per_step=1, best_min_trajectories=4)
    nats = msgspec.structs.replace(config.nats, exchange_memory_bytes=10_000)  # so that it is full soon
    retention = RetentionConfig(every_s=0.2, grace_s=0.0, adapters=4)
    config = msgspec.structs.replace(config, nats=nats, retention=retention)
    held: list[int] = []
    tracemalloc.start()
    try:
        async with Broker.connect(config.nats) as broker, kit.running(config):
            for steps in range(STEPS, ROUNDS * STEPS + 1, STEPS):
                for n in range(steps - STEPS, steps):
                    await _step(broker, n)
                subject_token.cache_clear()  # it has a bound
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
                groups = steps * (DISCARDED + 2)
                told = f"{groups} groups: {held[-1] / 2**20:.2f} MiB held, {_resident_mib():.0f} MiB resident"
                print(told)  # noqa: T201
    finally:
        tracemalloc.stop()
    # The first two rounds fill what has a bound; a later one may allocate something once. So the growth is the median
    # of the slopes between two rounds (Theil and Sen).
    pairs = itertools.combinations(enumerate(held[1:]), 2)
    growth = statistics.median((after - before) / (j - i) for (i, before), (j, after) in pairs)
    assert growth / (STEPS * (DISCARDED + 2)) < BYTES_PER_GROUP
