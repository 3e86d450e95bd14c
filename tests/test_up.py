"""`journeyman up` as an attacker on the same machine meets it: users, environments, files. vLLM's part is in
`test_loop`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parent.parent
JOURNEYMAN = str(Path(sys.executable).with_name("journeyman"))
CANARIES = {
    "OPENAI_API_KEY": {"judge"},  # named by judge.api_key_env
    "AWS_SECRET_ACCESS_KEY": {"store", "ui"},
    "HF_TOKEN": {"vllm", "trainer"},
    "LANGFUSE_SECRET_KEY": {"telemetry"},
    "SOMETHING_ELSE": set[str](),
}
"""Variables that `up` is started with, and the processes that may see them."""


def environment(**more: str) -> dict[str, str]:
    """What `up` is started with: this process's own and the canaries."""
    given = {name: f"canary-{name}" for name in CANARIES if name != "LANGFUSE_SECRET_KEY"}
    return {**os.environ, **given, **more}


def check_environments(state: dict[str, Any], run_dir: Path) -> None:
    """No process of a running installation sees a variable that its settings do not name, and no command line a
    secret."""
    secrets = [f.read_bytes().strip() for f in run_dir.glob("keys/*")]
    for name, service in state["services"].items():
        lines = Path(f"/proc/{service['pid']}/environ").read_bytes().decode().split("\0")
        command = Path(f"/proc/{service['pid']}/cmdline").read_bytes()
        assert not [s for s in secrets if s in command], name
        seen = dict(line.split("=", 1) for line in lines if "=" in line)
        assert not {c for c in CANARIES if c in seen and name not in CANARIES[c]}, name
        assert "OPENAI_API_KEY" in seen or name != "judge"
        assert ("VLLM_API_KEY" in seen) == (name == "vllm")


def check_stranger(url: str) -> None:
    """Who has no key is refused by NATS."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as stranger:
        stranger.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
        said = b""
        while data := stranger.recv(4096):
            said += data
    assert b"Authorization Violation" in said


def check_files(run_dir: Path) -> None:
    """What a run leaves is its owner's alone, and holds secrets in their own files only."""
    files = [run_dir, *run_dir.rglob("*")]
    assert not [f for f in files if f.stat().st_mode & 0o077]
    kept = [*run_dir.glob("keys/*"), run_dir / "gateway.secret"]
    secrets = [f.read_bytes().strip() for f in kept]
    assert len(secrets) >= 9
    for file in files:
        if file.is_file() and file not in kept:
            content = file.read_bytes()
            assert not [s for s in secrets if s in content], file
            assert b"canary-" not in content, file


def until(condition: Any, process: subprocess.Popen[bytes], run_dir: Path) -> Any:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if found := condition():
            return found
        time.sleep(0.1)
    logs = {p.name: p.read_text()[-1500:] for p in (run_dir / "logs").glob("*.log")}
    raise AssertionError("\n".join(f"== {k}\n{v}" for k, v in logs.items()))


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_an_installation_has_private_files_and_authenticated_ports(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o755)  # as an earlier version left it
    settings = {
        "models.0.name": "tictactoe",
        "models.0.base": str(ROOT / "examples" / "tictactoe" / "model"),
        "judge.group_size": 2,
        "judge.api_key_env": "OPENAI_API_KEY",
        "trainer.groups_per_step": 1,
        "telemetry.enabled": "on",
    }
    flags = [f for k, v in settings.items() for f in ("--set", f"{k}={json.dumps(v)}")]
    up = [JOURNEYMAN, "up", "--run-dir", str(run_dir), "--vllm-url", "http://127.0.0.1:9", *flags]
    sink = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}

    def journeyman(*args: str) -> Any:
        """The answer of a command, which connects as the operator."""
        command = [JOURNEYMAN, *args, "--run-dir", str(run_dir)]
        return json.loads(subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout)

    with subprocess.Popen(up, cwd=ROOT, stdout=subprocess.DEVNULL, env=environment(**sink)) as process:
        try:

            def state() -> dict[str, Any]:
                path = run_dir / "state.json"
                return json.loads(path.read_text()) if path.exists() else {}

            until(lambda: state().get("ready"), process, run_dir)
            assert set(state()["services"]) == {
                "nats",
                "gateway",
                "sampler",
                "judge",
                "trainer",
                "store",
                "ui",
                "telemetry",
            }
            check_environments(state(), run_dir)
            check_stranger(state()["urls"]["nats"])

            # Every service does its work with the rights it has: from a run's end to the trainer's word on its group.
            with httpx.Client(base_url=state()["urls"]["gateway"], timeout=60) as client:
                for attempt in range(2):
                    body = {
                        "model": "tictactoe",
                        "group": "g",
                        "attempt": attempt,
                        "metadata": {"x": "y" * 1_046_000},
                    }
                    opened = client.post("/v1/trajectories", json=body).json()
                    done = client.post(
                        f"/v1/trajectories/{opened['id']}/complete", json={"reward": float(attempt)}
                    )
                    assert done.status_code == 200, done.text

            def discarded() -> bool:
                said = (run_dir / "logs" / "trainer.log").read_text()
                return "group discarded" in said

            until(discarded, process, run_dir)
            status = journeyman("status", "--json")
            assert {s["stream"]: s["messages"] for s in status["streams"]}["ROLLOUTS"] >= 4
            assert journeyman("dead", "list", "--json") == []
            assert "ermissions" not in "".join(p.read_text() for p in (run_dir / "logs").glob("*.log"))
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0
        finally:
            if process.poll() is None:
                process.kill()
    check_files(run_dir)
    rows = journeyman(
        "sql", "--format", "json", "SELECT count(*) AS n FROM trajectories WHERE completed_at IS NOT NULL"
    )
    assert rows == [{"n": 2}]
