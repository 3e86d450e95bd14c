"""Learning on the job, as its command: late results by answers' ids become steps, and the report says what happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.common.running import ROOT, rows


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_results_that_come_late_by_an_answers_id_train_each_game_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    small = {"steps": 2, "games": 16, "delay": 2, "eval-games": 40, "concurrency": 4, "seconds": 200}
    flags = [part for name, value in small.items() for part in (f"--{name}", str(value))]
    subprocess.run(
        [sys.executable, "-m", "examples.tictactoe.job", *flags, "--run-dir", str(run_dir)],
        check=True,
        cwd=ROOT,
    )
    report = json.loads((run_dir / "report.json").read_text())
    assert (report["steps"], report["failed_requests"], report["results"]["refused"]) == (2, 0, 0)
    assert report["results"]["taken"] >= 32
    (counts,) = rows(
        run_dir,
        "SELECT (SELECT count(DISTINCT group_id) FROM lineage) AS trained, "
        "(SELECT count(*) FROM signals) AS signals, (SELECT count(DISTINCT given_by) FROM signals) AS keys",
    )
    assert counts == {"trained": 32, "signals": report["results"]["taken"], "keys": 1}
