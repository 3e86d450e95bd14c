"""One installation at a time uses a run directory."""

import os
import select
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from pipeline.commands.main import main
from pipeline.commands.prepare import prepare
from pipeline.config import load
from pipeline.running import folder_lock
from pipeline.running.folder_lock import InstallationInUseError

ROOT = Path(__file__).parents[3]

UP = """
import sys
from pipeline.commands.main import main
main(["up", "--services", "store", "--run-dir", sys.argv[1]])
"""


def start(run_dir: Path) -> subprocess.Popen[str]:
    """A `journeywork up` that is ready: the NATS server and the store."""
    process = subprocess.Popen([sys.executable, "-c", UP, str(run_dir)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert any(line.startswith("ready") for line in process.stdout), "it ended before it was ready"
    return process


def end(process: subprocess.Popen[str], how: signal.Signals) -> int:
    process.send_signal(how)
    code = process.wait(60)
    assert process.stdout is not None
    process.stdout.close()
    return code


def files(run_dir: Path) -> dict[str, bytes]:
    return {name: (run_dir / name).read_bytes() for name in ("config.toml", "state.json", "nats/nats.conf")}


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_run_directory_in_use_is_refused_and_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = start(tmp_path)
    try:
        before = files(tmp_path)
        with pytest.raises(SystemExit, match=r"^2$"):
            main(["up", "--services", "store", "--run-dir", str(tmp_path)])
        said = (
            f"{tmp_path} is in use: journeywork up (process {process.pid}, or what it started) runs there; "
            "stop it first or choose another run_dir"
        )
        assert capsys.readouterr().err == f"journeywork: {said}\n"
        outside = ["nats.url=nats://127.0.0.1:1", 'vllm.urls=["http://127.0.0.1:1"]']
        with pytest.raises(InstallationInUseError, match=rf"journeywork up \(process {process.pid},"):
            prepare(load(None, [f"run_dir={tmp_path}", *outside]))
        command = ["exec", "nats", "--config", str(tmp_path / "config.toml"), "--port", "0"]
        with pytest.raises(SystemExit, match=r"^2$"):
            main(command)
        assert files(tmp_path) == before
    finally:
        assert end(process, signal.SIGTERM) == 0
    with folder_lock.lock_exclusively(tmp_path):
        pass


EXEC = """
import sys
from pathlib import Path
from pipeline.running import folder_lock
for server in sys.argv[2:]:
    folder_lock.lock_for_server(Path(sys.argv[1]), server)
print("held", flush=True)
sys.stdin.read()
"""


LEFT = """
import subprocess, sys
from pathlib import Path
from pipeline.running import folder_lock
with folder_lock.lock_exclusively(Path(sys.argv[1])) as lock:
    child = subprocess.Popen(["sleep", "600"], pass_fds=(lock,), stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    sys.stdin.read()
"""


def test_nothing_starts_beside_what_a_killed_up_left_behind(tmp_path: Path) -> None:
    """Two NATS servers wrote to one folder."""
    command = [sys.executable, "-c", LEFT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as up:
        assert up.stdout is not None
        child = int(up.stdout.readline())
        up.kill()
    said = rf"journeywork up \(process {up.pid}, or what it started\) runs there;"
    for lock in (
        partial(folder_lock.lock_for_server, tmp_path, "nats"),
        folder_lock.lock_exclusively(tmp_path).__enter__,
    ):
        with pytest.raises(InstallationInUseError, match=said):
            lock()
    ended = os.pidfd_open(child)
    os.kill(child, signal.SIGKILL)
    select.select([ended], [], [])
    os.close(ended)
    with folder_lock.lock_exclusively(tmp_path):
        pass


def test_servers_of_exec_share_a_run_directory_but_not_with_up_and_one_of_them_is_nats(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXEC, str(tmp_path), "nats", "vllm", "vllm"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as servers:
        assert servers.stdout is not None
        assert servers.stdout.readline() == b"held\n"
        refused = pytest.raises(InstallationInUseError, match="a server of journeywork exec runs there;")
        with refused, folder_lock.lock_exclusively(tmp_path):
            pass
        again = subprocess.run([*command[:4], "nats"], capture_output=True, text=True)
        assert f"journeywork exec nats (process {servers.pid}, or what it started) runs there;" in again.stderr
        servers.communicate()
    with folder_lock.lock_exclusively(tmp_path):
        pass
