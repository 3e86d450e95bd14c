"""`journeywork up` as an attacker on the same machine meets it: users, environments, files. vLLM's part is in
`test_loop`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kits.attacker import check_environments, check_files, check_stranger, environment

ROOT = Path(__file__).parent.parent
JOURNEYWORK = str(Path(sys.executable).with_name("journeywork"))


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
        "ui.port": 0,
    }
    flags = [f for k, v in settings.items() for f in ("--set", f"{k}={json.dumps(v)}")]
    up = [JOURNEYWORK, "up", "--run-dir", str(run_dir), "--vllm-url", "http://127.0.0.1:9", *flags]
    sink = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}

    def journeywork(*args: str) -> Any:
        """The answer of a command, which connects as the operator."""
        command = [JOURNEYWORK, *args, "--run-dir", str(run_dir)]
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
            status = journeywork("status", "--json")
            assert {row["consumer"] for row in status["lag"]} >= {"judge", "trainer", "store-rollouts"}
            assert journeywork("dead", "list", "--json") == []
            assert "ermissions" not in "".join(p.read_text() for p in (run_dir / "logs").glob("*.log"))
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0
        finally:
            if process.poll() is None:
                process.kill()
    check_files(run_dir)
    rows = journeywork(
        "sql", "--format", "json", "SELECT count(*) AS n FROM trajectories WHERE completed_at IS NOT NULL"
    )
    assert rows == [{"n": 2}]
