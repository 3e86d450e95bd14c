"""The flags of examples."""

from __future__ import annotations

from pathlib import Path

import journeywork.art as art
from examples.common import judged, running


def test_settings_and_a_server_reach_the_installation_that_a_judged_example_starts(tmp_path: Path) -> None:
    given = ["--set", "trainer.seed=3", "--set", "ui.port=0", "--vllm-url", "http://127.0.0.1:9"]
    args = running.arguments("", "mine", steps=1, held_out=1, argv=["--run-dir", str(tmp_path), *given])
    model = art.TrainableModel(name="mine", project="mine", base_model="b")
    assert judged.backend(args).command(tmp_path, model)[-8:] == ["--config", str(running.TWO_CORES), *given]
