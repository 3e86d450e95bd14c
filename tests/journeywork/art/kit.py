"""Helpers of the tests of `journeywork.art`: a small installation before an inference server that runs already."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
BASE = ROOT / "examples" / "tictactoe" / "model"
MODEL = "tictactoe"
SETTINGS = {
    "models.0.name": MODEL,
    "models.0.base": str(BASE),
    "vllm.max_model_len": 256,
    "trainer.lora.rank": 8,
    # Of one group a step: a test that trains several groups in one step shows that the batch was requested.
    "trainer.groups_per_step": 1,
    "ui.port": 0,
}


def flags(settings: dict[str, Any]) -> list[str]:
    return [part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]


class Up:
    """`journeywork up` in a process of its own, before an inference server at `vllm_url`."""

    def __init__(self, run_dir: Path, vllm_url: str, **settings: Any) -> None:
        self.run_dir = run_dir
        journeywork = Path(sys.executable).with_name("journeywork")
        self.process = subprocess.Popen(
            [
                str(journeywork),
                "up",
                "--run-dir",
                str(run_dir),
                "--vllm-url",
                vllm_url,
                *flags(SETTINGS | settings),
            ],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )

    def state(self) -> dict[str, Any]:
        path = self.run_dir / "state.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def wait(self) -> str:
        """The gateway's URL, once the installation is ready."""
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.state().get("ready"):
                return str(self.state()["urls"]["gateway"])
            time.sleep(0.1)
        logs = {p.name: p.read_text()[-1500:] for p in (self.run_dir / "logs").glob("*.log")}
        raise AssertionError("\n".join(f"== {k}\n{v}" for k, v in logs.items()))

    def sql(self, query: str) -> list[dict[str, Any]]:
        journeywork = Path(sys.executable).with_name("journeywork")
        command = [str(journeywork), "sql", "--run-dir", str(self.run_dir), "--format", "json", query]
        out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert out.returncode == 0, out.stderr
        return list(json.loads(out.stdout))

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(120)
        finally:
            self.process.kill()
            self.process.wait()
