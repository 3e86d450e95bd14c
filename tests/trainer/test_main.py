"""The trainer's processes: `python -m trainer` under a supervisor, and `journeywork train`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio.to_thread
import pytest

from pipeline import config as configuration
from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from pipeline.running.state import process_start
from tests.conftest import free_port
from tests.trainer import kit
from tests.trainer.kit import checkpoints, steps_reach
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.commands import train

pytestmark = pytest.mark.timeout(600)  # processes that import PyTorch


@pytest.mark.slow
async def test_stopping_the_trainer_during_a_step_leaves_only_complete_checkpoints(
    settings: kit.Settings, broker: Broker, tmp_path: Path
) -> None:
    config = settings(groups_per_step=1, max_staleness=100, keep_checkpoints=100)
    config = kit.with_many_loras(config)
    configuration.save(config, tmp_path / "config.toml")
    for i in range(30):
        await kit.publish_group(broker, f"g{i}", [0.0, 1.0], seed=i)
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "trainer", "--config", str(tmp_path / "config.toml"), "--ready-fd", str(writing)],
        pass_fds=[writing],
    ) as process:
        os.close(writing)
        with os.fdopen(reading) as said:
            assert json.loads(await anyio.to_thread.run_sync(said.readline)) == {"ready": True, "step": 0}
        await steps_reach(broker, 2)
        process.send_signal(signal.SIGTERM)
        assert await anyio.to_thread.run_sync(process.wait, 60) == 0
    events = await checkpoints(broker)
    folder = Checkpoints.of(config, kit.MODEL)
    # Every step is whole on disk, and the log is level with it or one step behind.
    assert folder.steps() in (list(range(1, len(events) + 1)), list(range(1, len(events) + 2)))
    for step in folder.steps():
        folder.read(step)
    assert not list(folder.folder.glob(".tmp-*"))


def test_train_says_in_one_line_why_it_does_not_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a log, at one that does not answer, and beside the trainer of `journeywork up`."""
    configuration.save(kit.settings("base", tmp_path), tmp_path / "config.toml")
    log = ["--set", f"nats.url=nats://127.0.0.1:{free_port()}", "--set", "nats.connect_timeout_s=0.2"]
    running = {"pid": os.getpid(), "since": process_start(os.getpid()), "state": "ready", "restarts": 0}
    beside = {"urls": {}, "services": {"trainer": running}}
    for options, state, code, told in (
        ([], None, 2, "nats.url"),
        (log, None, 1, "no NATS server answers"),
        (log, beside, 2, f"`journeywork up` trains there already, as process {os.getpid()}"),
    ):
        if state:
            (tmp_path / "state.json").write_text(json.dumps(state))
        with pytest.raises(SystemExit) as error:
            train.main(["--run-dir", str(tmp_path), *options])
        assert (error.value.code, told in capsys.readouterr().err.splitlines()[-1]) == (code, True)


_TRAIN = """
import sys
asked = []
sys.addaudithook(lambda event, args: asked.append(args[0]) if event == "socket.getaddrinfo" else None)
from trainer.commands import train
train.main()
from huggingface_hub.utils import _telemetry
_telemetry._TELEMETRY_QUEUE.join()
print(*{*asked} - {"127.0.0.1"})
"""


@pytest.mark.slow
async def test_train_runs_to_max_steps_ends_and_makes_no_request_to_the_internet(
    broker: Broker, nats_config: NatsConfig, tiny_base: str, tmp_path: Path
) -> None:
    config = kit.settings(tiny_base, tmp_path, NatsConfig(), groups_per_step=1, max_steps=1)
    configuration.save(config, tmp_path / "config.toml")
    await kit.publish_group(broker, "g0", [0.0, 1.0], seed=1)
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_DISABLE_TELEMETRY"}
    arguments = ["--run-dir", str(tmp_path), "--set", f"nats.url={nats_config.url}"]
    done = await anyio.run_process([sys.executable, "-c", _TRAIN, *arguments], env=env)
    assert done.stdout.strip() == b""
    assert [e.version for e in await checkpoints(broker)] == ["tiny@1"]
