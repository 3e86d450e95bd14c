"""A disk that fills up under a whole installation: nothing ends, and everything goes on once there is space."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import VllmServer
from tests.kits.disk import small_disk
from tests.kits.installation import SMALL, Up, run_groups, up

GROUP = 2
GROUPS = 4
"""Groups of a step."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 192) as folder:
        yield folder


def write_for_ever(file: int, data: bytes) -> None:
    while True:
        os.write(file, data)


def fill(disk: Path) -> Path:
    """Write a file until nothing more fits, not even a short file or another name."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with pytest.raises(OSError, match="No space left"):
                write_for_ever(file.fileno(), bytes(size))
    return ballast


def children(run: Up) -> set[int]:
    """Return the processes that the supervisor has started and that run now: each has a session of its own."""
    running = set()
    for child in psutil.Process(run.process.pid).children():
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            if os.getsid(child.pid) == child.pid:
                running.add(child.pid)
    return running


def healthy(run: Up, before: set[int]) -> bool:
    """Return whether the supervisor has written, since the processes `before` ended, that all is well."""
    told = run.state
    pids = {service["pid"] for service in told["services"].values()}
    return bool(told["ready"]) and not told["alarms"] and not pids & before


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_installation_outlives_a_full_disk(disk: Path) -> None:
    """Its own output is on the full disk, too."""
    settings = (
        *SMALL,
        "models.0.name=tictactoe",
        f"models.0.base={VllmServer.base}",
        f"judge.group_size={GROUP}",
        "trainer.optimizer.learning_rate=2e-3",
        "nats.publish_deadline_s=5.0",
        "supervisor.deadline_s=10.0",
        "supervisor.probe_every_s=0.5",
    )
    with up(disk, disk / "run", "--run-dir", str(disk / "run"), settings=settings) as run:
        finished: list[str] = []
        run_groups(run.url, "before", GROUPS, finished)
        run.until_step(1)
        ballast = fill(disk)
        # Each service writes now: the log its streams, the store its files, the trainer a checkpoint.
        with pytest.raises(httpx.HTTPError):
            run_groups(run.url, "during", 200, finished)
        # Processes that die meanwhile have to be started again, with their logs and settings on the full disk.
        before = children(run)
        for pid in before:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.kill(pid, signal.SIGKILL)
        run.until(lambda: len(children(run) - before) >= 2)
        ballast.unlink()
        run.until(lambda: healthy(run, before), 400)
        run_groups(run.url, "after", GROUPS, finished)
        run.until_step(2)
    assert run.process.returncode == 0
    rows = run.query("SELECT trajectory FROM trajectories WHERE completed_at IS NOT NULL")
    recorded = [row["trajectory"] for row in rows]
    assert len(recorded) == len(set(recorded))
    assert not set(finished) - set(recorded)
