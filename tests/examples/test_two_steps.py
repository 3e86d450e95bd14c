"""Each example's script, run as its README says, for two steps: the whole installation, with the double as vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from examples.common.history import rows
from examples.common.running import ROOT
from examples.inbox.messages import message
from examples.mcp_rl.shop import ITEMS
from examples.support.desk import ACTIONS, MOODS
from tests.conftest import InferenceDouble

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

EXAMPLES: dict[str, list[str]] = {
    "mcp_rl": [
        "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
        for name, arguments in (
            ("schema", {}),
            *(("query", {"sql": f"SELECT count(*) FROM orders WHERE item = '{item}'"}) for item in ITEMS),
        )
    ],
    "support": [f"{first} {action} Your order is 12." for first in MOODS.values() for action in ACTIONS.values()],
}
"""For each example, the words that the double answers with: with arbitrary ones, all rewards would be equal."""
FREQUENT = [message("train", number).right for number in range(12)]
"""Answers of the demo's agents: right for some messages, in part for others."""
SMALL = ["--steps", "2", "--held-out", "4", "--set", "trainer.groups_per_step=2"]
UNCHECKED = ["--set", "trainer.logprob_bound=1e9", "--set", "trainer.check_share=0.0", "--set", "ui.enabled=false"]
"""The double's logprobs are not the model's. Nobody looks at the dashboard."""
SHORT = ["--end-every", "2"]
"""Short replies of the double: a run whose prompt outgrows the model's length fails."""


def run(*command: str) -> str:
    """The output of a Python module. Its errors go to the test's."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return done.stdout


@pytest.mark.parametrize("name", ["support"])
def test_an_example_trains_two_steps_and_compares_them_with_its_base(name: str, tmp_path: Path) -> None:
    base, run_dir = tmp_path / "model", tmp_path / "run"
    run(f"examples.{name}.make_model", "--steps", "0", "--out", str(base))
    tokenizer = AutoTokenizer.from_pretrained(base)
    if tokenizer.add_tokens([word for word in EXAMPLES[name] if len(tokenizer(word).input_ids) > 1]):
        tokenizer.save_pretrained(base)  # the model's vocabulary has room for some more tokens
    double = InferenceDouble(tmp_path, args=(*SHORT, "--words", *EXAMPLES[name]))
    double.base, double.model = base, name
    double.start()
    try:
        said = run(
            f"examples.{name}.train",
            *SMALL,
            *UNCHECKED,
            "--run-dir",
            str(run_dir),
            "--base",
            str(base),
            "--config",
            "examples/common/two_cores.toml",
            "--vllm-url",
            double.url,
        )
    finally:
        double.stop()
    report = json.loads((run_dir / "report.json").read_text())
    assert report["steps"] == 2
    assert report["before"]["count"] == report["after"]["count"] == report["difference"]["count"] == 4
    assert report["failed"] == 0
    assert "paired difference" in said
    trained = rows(run_dir, "SELECT step, count(DISTINCT group_id) AS groups FROM lineage GROUP BY step ORDER BY step")
    assert trained == [{"step": 1, "groups": 2}, {"step": 2, "groups": 2}]
    assert rows(run_dir, "SELECT count(*) AS n FROM rewards WHERE split = 'train' AND reward IS NULL") == [{"n": 0}]
    assert len((ROOT / "examples" / name / "train.py").read_text().splitlines()) <= 150


@pytest.mark.parametrize("way", ["function", "job"])
def test_the_demo_warms_up_trains_and_reports(way: str, tmp_path: Path) -> None:
    base, run_dir = tmp_path / "model", tmp_path / "run"
    run("examples.support.make_model", "--steps", "0", "--out", str(base))
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(FREQUENT)
    tokenizer.save_pretrained(base)
    double = InferenceDouble(tmp_path, args=(*SHORT, "--words", *FREQUENT))
    double.base, double.model = base, "inbox"
    double.start()
    try:
        said = run(
            "examples.inbox.demo",
            "--steps",
            "2",
            "--held-out",
            "8",
            "--seconds",
            "600",
            "--way",
            way,
            "--delay",
            "1",
            "--base",
            str(base),
            "--run-dir",
            str(run_dir),
            "--vllm-url",
            double.url,
            *UNCHECKED,
            "--set",
            "vllm.max_model_len=0",
            "--set",
            "gateway.detection.idle_s=2",
        )
    finally:
        double.stop()
    report = json.loads((run_dir / "report.json").read_text())
    assert report["versions"] == {"base": "inbox@0", "warm_start": "inbox@1", "trained": "inbox@3"}
    assert {score["n"] for score in report["held_out"].values()} == {8}
    assert (report["failed_calls"], report["findings"], report["difference"]["n"]) == (0, {}, 8)
    assert len(report["answers"]) == 5
    assert "checks of the history" in " ".join(said.split())
    assert (run_dir / "warm_start" / "adapter_config.json").is_file()
