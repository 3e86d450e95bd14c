"""The demo, run as its README says, for two steps: the whole installation, with the double as vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from examples.common.running import ROOT
from examples.inbox.messages import SYSTEM, message
from tests.conftest import InferenceDouble
from tests.kits.services import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

FREQUENT = [message("train", number).right for number in range(12)]
"""Answers of the demo's agents: right for some messages, in part for others."""
UNCHECKED = ["--set", "trainer.logprob_bound=1e9", "--set", "trainer.check_share=0.0", "--set", "ui.enabled=false"]
"""The double's logprobs are not the model's. Nobody looks at the dashboard."""
SHORT = ["--end-every", "2"]
"""Short replies of the double: a run whose prompt outgrows the model's length fails."""


def run(*command: str, **flags: object) -> str:
    """The output of a Python module. Its errors go to the test's."""
    given = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", *command, *given],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return done.stdout


@pytest.mark.parametrize("way", ["function", "job"])
def test_the_demo_warms_up_trains_and_reports(way: str, tmp_path: Path) -> None:
    base, run_dir = tmp_path / "model", tmp_path / "run"
    run("examples.tictactoe.make_model", steps=0, out=base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([*FREQUENT, SYSTEM])  # byte by byte, prompts would not fit beside an answer
    tokenizer.save_pretrained(base)
    double = InferenceDouble(tmp_path, args=(*SHORT, "--words", *FREQUENT))
    double.base, double.model = base, "inbox"
    with serving(double):
        said = run(
            "examples.inbox.demo",
            *UNCHECKED,
            *("--set", "vllm.max_model_len=0", "--set", "gateway.detection.idle_s=2"),
            steps=2,
            held_out=8,
            seconds=600,
            way=way,
            delay=1,
            base=base,
            run_dir=run_dir,
            vllm_url=double.url,
        )
    report = json.loads((run_dir / "report.json").read_text())
    assert report["versions"] == {"base": "inbox@0", "warm_start": "inbox@1", "trained": "inbox@3"}
    assert {score["n"] for score in report["held_out"].values()} == {8}
    assert (report["failed_calls"], report["findings"], report["difference"]["n"]) == (0, {}, 8)
    assert len(report["answers"]) == 5
    assert "checks of the history" in " ".join(said.split())
    assert (run_dir / "warm_start" / "adapter_config.json").is_file()
