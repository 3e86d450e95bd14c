"""`journeywork up` as an attacker on the same machine meets it: users, environments, files. vLLM's part is in
`test_loop`."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import VllmServer
from tests.kits.attacker import check_environments, check_files, check_stranger, environment
from tests.kits.installation import JOURNEYWORK, ROOT, program, started


@pytest.mark.timeout(1200)
@pytest.mark.slow
def test_an_installation_has_private_files_and_authenticated_ports(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o755)  # as an earlier version left it
    settings = (
        "models.0.name=tictactoe",
        f"models.0.base={VllmServer.base}",
        "judge.group_size=2",
        "judge.api_key_env=OPENAI_API_KEY",
        "trainer.groups_per_step=1",
        "telemetry.enabled=on",
    )
    flags = ("--run-dir", str(run_dir), "--vllm-url", "http://127.0.0.1:9")
    env = environment(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")

    def journeywork(*args: str) -> Any:
        """The answer of a command, which connects as the operator."""
        return json.loads(program([*JOURNEYWORK, *args, "--run-dir", str(run_dir)], ROOT))

    with started(tmp_path, run_dir, *flags, settings=settings, env=env, seconds=240) as run:
        services = "nats gateway sampler judge trainer store ui telemetry"
        assert set(run.state["services"]) == set(services.split())
        check_environments(run.state, run_dir)
        check_stranger(run.state["urls"]["nats"])

        # Every service does its work with the rights it has: from a run's end to the trainer's word on its group.
        with httpx.Client(base_url=run.url, timeout=60) as client:
            for attempt in range(2):
                body = {"model": "tictactoe", "group": "g", "attempt": attempt, "metadata": {"x": "y" * 1_046_000}}
                opened = client.post("/v1/trajectories", json=body).json()
                done = client.post(f"/v1/trajectories/{opened['id']}/complete", json={"reward": float(attempt)})
                assert done.status_code == 200, done.text

        def discarded() -> bool:
            said = (run_dir / "logs" / "trainer.log").read_text()
            return "group discarded" in said

        run.until(discarded, 240)
        status = journeywork("status", "--json")
        assert {row["consumer"] for row in status["lag"]} >= {"judge", "trainer", "store-rollouts"}
        assert journeywork("dead", "list", "--json") == []
        assert "ermissions" not in "".join(p.read_text() for p in (run_dir / "logs").glob("*.log"))
    assert run.process.returncode == 0
    check_files(run_dir)
    rows = run.query("SELECT count(*) AS n FROM trajectories WHERE completed_at IS NOT NULL")
    assert rows == [{"n": 2}]
