"""`journeywork up` as a process. For tests of programs that train it runs before the inference double: no vLLM, real
everything else."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
from anyio.from_thread import start_blocking_portal

from examples.common.history import rows
from pipeline.log.broker import Broker
from pipeline.running.installations import installation_settings, log_of
from tests.conftest import InferenceDouble
from tests.kits.services import serving

ROOT = Path(__file__).parents[2]
JOURNEYWORK = [sys.executable, "-m", "pipeline"]
SMALL = (
    "trainer.groups_per_step=4",
    "trainer.lora.rank=8",
    "vllm.max_lora_rank=8",
    "vllm.max_model_len=256",
    "gateway.port=0",
    "trainer.logprob_bound=1000",  # the double's logprobs are not the model's
)
"""Settings for the demo's model."""


@dataclass
class Up:
    """A running installation."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    log: Path

    @property
    def state(self) -> dict[str, Any]:
        """What the supervisor has written; before it did, nothing is ready."""
        path = self.run_dir / "state.json"
        return json.loads(path.read_text()) if path.exists() else {"ready": False, "services": {}}

    @property
    def url(self) -> str:
        return str(self.state["urls"]["gateway"])

    def until(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        """Wait until the condition holds. Fails with the ends of the logs if the installation ends or time is over."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                logs = [self.log, *self.run_dir.glob("logs/*.log")]
                raise AssertionError("\n".join(f"== {log.name}\n{log.read_text()[-2000:]}" for log in logs))
            time.sleep(0.2)

    def until_step(self, step: int) -> None:
        """Wait until the gateway serves this policy step or a later one."""
        self.until(lambda: httpx.get(f"{self.url}/v1/policies", timeout=60).json()["data"][0]["step"] >= step)

    def stop(self) -> None:
        """Stop it, with everything written to the store."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(100)
            finally:
                self.process.kill()

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Return the rows that `journeywork sql` prints, without a process for it. While the installation runs, waits
        first until the store has written what is on the log now: a step is answered before the store has its rows."""
        if self.process.poll() is None:
            with start_blocking_portal() as portal:
                portal.call(self._until_stored)
        return rows(self.run_dir, sql)

    async def _until_stored(self) -> None:
        config = installation_settings(self.run_dir, sections=("nats",))
        async with Broker.connect(log_of(config), name="operator", provision=False) as broker:
            with anyio.fail_after(60):
                while await broker.lag("store-"):
                    await anyio.sleep(0.05)


def program(command: Sequence[str], cwd: Path, **env: str) -> str:
    """Return what a program prints. Fails with its errors if it fails."""
    given = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def started(
    folder: Path,
    run_dir: Path,
    *flags: str,
    settings: Sequence[str],
    cwd: Path = ROOT,
    env: Mapping[str, str] = os.environ,
    seconds: float = 120,
) -> Iterator[Up]:
    """Run `journeywork up` within the block, which begins when it is ready. `folder` takes logs, `flags` are more of
    the command's flags, `env` is the whole environment, `seconds` is the longest start."""
    # Tests run beside each other: each dashboard takes any port, so that none is tried twice.
    command = [*JOURNEYWORK, "up", *flags, "--set", "ui.port=0"]
    command += [part for setting in settings for part in ("--set", setting)]
    path = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    with (folder / "up.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=cwd, env={**env, "PYTHONPATH": os.pathsep.join(path)}, stdout=log, stderr=log
        )
    running = Up(process, run_dir, folder / "up.log")
    try:
        running.until(lambda: running.state["ready"], seconds)
        yield running
    finally:
        running.stop()


@contextmanager
def up(folder: Path, run_dir: Path, *flags: str, settings: Sequence[str] = SMALL, cwd: Path = ROOT) -> Iterator[Up]:
    """As `started`, before a double of its own."""
    with (
        serving(InferenceDouble(folder)) as double,
        started(folder, run_dir, *flags, "--vllm-url", double.url, settings=settings, cwd=cwd) as running,
    ):
        yield running


def run_groups(url: str, name: str, count: int, finished: list[str]) -> None:
    """Have two agents of each group make a call and finish with different rewards. Add the ids of the runs that the
    gateway said were complete to `finished`."""
    with httpx.Client(base_url=url, timeout=60) as client:
        for group, attempt in itertools.product((f"{name}-{i}" for i in range(count)), range(2)):
            opening = {"model": "tictactoe", "group": group, "attempt": attempt}
            run = client.post("/v1/trajectories", json=opening).raise_for_status().json()
            call = {"model": "tictactoe", "messages": [{"role": "user", "content": f"{group}"}], "max_tokens": 4}
            key = {"Authorization": f"Bearer {run['api_key']}"}
            client.post(f"{run['base_url']}/chat/completions", json=call, headers=key).raise_for_status()
            client.post(f"/v1/trajectories/{run['id']}/complete", json={"reward": float(attempt)}).raise_for_status()
            finished.append(run["id"])
