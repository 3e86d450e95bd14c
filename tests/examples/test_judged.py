"""From a sentence and from an MCP server to a trained adapter: script, then notebook, on one installation before the
double."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.conftest import InferenceDouble
from tests.examples.test_notebooks import run as run_notebook
from tests.examples.test_notebooks import shown
from tests.examples.test_two_steps import EXAMPLES, run
from tests.journeywork.art.kit import installation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning"),
]

ENDED = """SELECT (SELECT count(DISTINCT group_id) FROM trajectories WHERE split = 'train') AS groups,
  (SELECT count(DISTINCT group_id) FROM lineage) AS trained,
  (SELECT count(*) FROM group_discarded WHERE reason = 'no_variance') AS equal"""
"""The double answers at random: all attempts of a group may be worth the same, and then it trains nothing."""
DIFFERENCE = r"-?\d\.\d+ \[.*\] over 2"


@pytest.mark.parametrize(("name", "model_of"), [("auto_rl", "support"), ("mcp_rl", "mcp_rl")])
def test_script_and_notebook_train_and_compare_held_out_scenarios(
    name: str, model_of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    base, words = tmp_path / "model", EXAMPLES[model_of]
    run(f"examples.{model_of}.make_model", "--steps", "0", "--out", str(base))
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([word for word in words if len(tokenizer(word).input_ids) > 1])
    tokenizer.save_pretrained(base)
    double = InferenceDouble(tmp_path, args=("--end-every", "2", "--words", *words))
    double.base, double.model = base, name
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    settings = {"models.0.name": name, "models.0.base": str(base)}
    double.start()
    try:
        with installation(tmp_path / "run", double.url, **settings) as up:
            monkeypatch.setenv("JOURNEYWORK_URL", up.url)
            said = run(
                f"examples.{name}.train",
                "--steps",
                "2",
                "--held-out",
                "2",
                "--run-dir",
                str(tmp_path / "script"),
                "--base",
                str(base),
            )
            cells = run_notebook(
                f"{name}.ipynb", tmp_path, monkeypatch, BASE_MODEL=str(base), STEPS="1", HELD_OUT="2", MAX_TOKENS="24"
            )
    finally:
        double.stop()
    assert re.search(f"less that of the base model: {DIFFERENCE}", said)
    assert "step 1: mean score" in shown(cells[-3])
    assert re.search(f"difference: {DIFFERENCE}", shown(cells[-2]))
    (ended,) = up.query(ENDED)
    assert ended["groups"] == ended["trained"] + ended["equal"]
