"""Learning on the job, as its command: late results by answers' ids become steps, and the report says what happened."""

import json
from pathlib import Path

import pytest

from examples.common.history import rows
from examples.tictactoe.game import CELLS
from tests.conftest import InferenceDouble
from tests.examples.test_two_steps import UNCHECKED, run
from tests.kits.services import serving


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_results_that_come_late_by_an_answers_id_train_each_game_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    # The double plays at random. Of 24 games some end otherwise than by an illegal move.
    small = {"steps": 2, "games": 24, "delay": 1, "eval_games": 20, "concurrency": 8, "seconds": 900}
    with serving(InferenceDouble(tmp_path, args=("--words", *CELLS))) as double:
        run(
            "examples.tictactoe.job",
            *UNCHECKED,
            *("--set", "gateway.detection.idle_s=2"),
            **small,
            run_dir=run_dir,
            vllm_url=double.url,
        )
    report = json.loads((run_dir / "report.json").read_text())
    assert (report["steps"], report["failed_runs"], report["results"]["refused"]) == (2, 0, 0)
    assert report["results"]["taken"] >= 48
    (counts,) = rows(
        run_dir,
        "SELECT (SELECT count(DISTINCT group_id) FROM lineage) AS trained, "
        "(SELECT count(*) FROM signals) AS signals, (SELECT count(DISTINCT given_by) FROM signals) AS keys",
    )
    assert counts == {"trained": 48, "signals": report["results"]["taken"], "keys": 1}
