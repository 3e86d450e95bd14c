"""A log that was made with more room goes on with less."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from pipeline.config import Config, NatsConfig
from pipeline.events import TrajectoryCompleted
from pipeline.log.broker import Broker
from pipeline.running.plan import nats_command
from tests.conftest import free_port
from tests.kits.events import completed


@contextlib.contextmanager
def log_server(run_dir: Path, max_bytes: int) -> Iterator[NatsConfig]:
    """The log's server as `journeywork up` starts it; yields the settings of its clients."""
    port = free_port()
    settings = NatsConfig(url=f"nats://127.0.0.1:{port}", max_bytes=max_bytes)
    spec = nats_command(Config(run_dir=str(run_dir), nats=settings), port)
    assert spec.prepare is not None
    spec.prepare()
    process = subprocess.Popen(spec.argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield settings
    finally:
        process.terminate()
        process.wait()


async def test_a_run_goes_on_when_the_disk_has_less_room(tmp_path: Path) -> None:
    run_dir = tmp_path / "José's runs"  # the server's configuration names the folder
    with log_server(run_dir, 4_000_000_000) as settings:
        async with Broker.connect(settings) as broker:
            await broker.publish(completed())
    # Twice: the first start with less room must not leave behind what refuses the second.
    for max_bytes in (1_000_000_000, 900_000_000):
        with log_server(run_dir, max_bytes) as settings:
            async with Broker.connect(settings) as broker:
                assert len(await broker.read(TrajectoryCompleted)) == 1
                limits = [
                    (await broker.stream_info(name)).config.max_bytes or 0 for name in ("ROLLOUTS", "GROUPS", "POLICY")
                ]
                assert sum(limits) < max_bytes
    with log_server(run_dir, 8_000_000_000) as settings:
        async with Broker.connect(settings) as broker:
            assert ((await broker.stream_info("ROLLOUTS")).config.max_bytes or 0) > 900_000_000
