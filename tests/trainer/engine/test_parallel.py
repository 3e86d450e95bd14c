"""Two processes take the same step as one; on CPU, over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from pipeline.config import NatsConfig, save
from pipeline.events import CheckpointPublished
from pipeline.log.broker import Broker
from tests.conftest import NatsServer
from tests.trainer.kit import MODEL, exactly, publish_group, settings, with_many_loras
from tests.trainer.parallel_child import step_without_room, steps
from trainer import service
from trainer.checkpoints.checkpoint import Checkpoints, weights_of
from trainer.engine.engine import Engine

pytestmark = pytest.mark.timeout(400)


def launched(base: str, out: Path, *how: str) -> list[dict[str, Any]]:
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
        "--module", "tests.trainer.parallel_child", base, str(out), *how,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[:6000]
    found: list[dict[str, Any]] = torch.load(out, weights_only=False)
    return found


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], share: float = 1e-6) -> None:
    """To `share` of the largest value. Computed in float64: Adam's first steps are of one size however small a
    gradient is, so rounding in a gradient near 0 shows in a weight."""
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        scale = float(theirs[name].abs().max())
        torch.testing.assert_close(tensor, theirs[name], rtol=share, atol=share * scale)


@pytest.mark.parametrize("how", [(), ("fail",)], ids=["plain", "one runs out of memory"])
@pytest.mark.slow
def test_two_processes_take_the_same_step_as_one(
    tiny_base: str, tmp_path: Path, how: tuple[str, ...]
) -> None:
    config = settings(tiny_base, tmp_path, dtype="float64", **{"optimizer.learning_rate": 1e-4})
    alone = steps(exactly(Engine(tiny_base, config.trainer, tmp_path)))
    both = launched(tiny_base, tmp_path / "out.pt", *how)
    for one, two in zip(alone, both, strict=True):
        assert_same(two["gradients"], one["gradients"])
        assert_same(two["weights"], one["weights"])
        for name in (
            "loss",
            "grad_norm",
            "tokens",
            "sequences",
            "ratio_max",
            "kl_sampler",
            "staleness_max",
        ):
            assert two["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-6, abs=1e-9), name
    assert all(two["metrics"]["micro_batches"] >= 2 for two in both[1:])
    if how:
        assert both[0]["first"]["token_budget"] == 75  # of 150


@pytest.mark.slow
def test_two_processes_drop_the_sequence_that_fits_in_neither(tiny_base: str, tmp_path: Path) -> None:
    config = settings(tiny_base, tmp_path, **{"optimizer.learning_rate": 1e-4, "dtype": "float64"})
    alone = step_without_room(exactly(Engine(tiny_base, config.trainer, tmp_path)))
    both: Any = launched(tiny_base, tmp_path / "out.pt", "too_large")
    assert len(alone["dropped"]) == 1
    assert both["dropped"] == alone["dropped"]
    assert_same(both["weights"], alone["weights"])
    for name in ("sequences_dropped", "tokens_dropped", "sequences", "tokens"):
        assert both["metrics"][name] == alone["metrics"][name], name
    assert both["metrics"]["loss"] == pytest.approx(alone["metrics"]["loss"], rel=1e-6)
    assert both["metrics"]["micro_batches"] >= 2


@pytest.mark.anyio
@pytest.mark.slow
async def test_the_service_runs_as_two_processes_and_stops_as_one(
    tiny_base: str, nats_config: NatsConfig, tmp_path: Path
) -> None:
    """`trainer.processes = 2`, as `journeywork up` starts it; then the same groups by one process from another log."""
    several = with_many_loras(
        settings(
            tiny_base,
            tmp_path / "two",
            nats_config,
            processes=2,
            max_steps=2,
            dtype="float64",
            **{"optimizer.learning_rate": 1e-4},
        )
    )
    save(several, tmp_path / "two.toml")
    reading, writing = os.pipe()
    async with Broker.connect(nats_config) as broker:
        await _publish(broker)
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "trainer", "--config", str(tmp_path / "two.toml"), "--ready-fd", str(writing)],
                pass_fds=[writing], stderr=log, stdout=log,
            )  # fmt: skip
        os.close(writing)
        try:
            with anyio.fail_after(300):
                line = await anyio.to_thread.run_sync(os.read, reading, 1000)
                assert b"ready" in line, (tmp_path / "log").read_text()[-3000:]
                while len(await _checkpoints(broker)) < 2:
                    assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                    await anyio.sleep(0.1)
            process.terminate()
            await anyio.to_thread.run_sync(process.wait, 60)
        finally:
            os.close(reading)
            process.kill()
            process.wait()
        published = await _checkpoints(broker)
    assert [c.step for c in published] == [1, 2]
    assert all(c.metrics["micro_batches"] >= 2 for c in published)
    other = NatsServer(tmp_path / "nats")
    other.folder.mkdir()
    other.start()
    try:
        url = NatsConfig(url=other.url)
        async with Broker.connect(url) as broker:
            await _publish(broker)
        one = with_many_loras(
            settings(
                tiny_base,
                tmp_path / "one",
                url,
                max_steps=2,
                dtype="float64",
                **{"optimizer.learning_rate": 1e-4},
            )
        )
        with anyio.fail_after(200):
            await service.train(one, lambda **_: None)
    finally:
        other.stop()
    found = [weights_of(Checkpoints.of(c, MODEL).read(2)[1]) for c in (several, one)]
    # The services compute norms in float32, as transformers does.
    assert_same(found[0], found[1], share=1e-3)


async def _publish(broker: Broker) -> None:
    for i in range(4):
        await publish_group(broker, f"g{i}", [0.0, 1.0, 0.5], seed=i)


async def _checkpoints(broker: Broker) -> list[CheckpointPublished]:
    history = await broker.read(CheckpointPublished)
    return [r.event for r in history]
