"""From a sentence and from an MCP server to a trained adapter: the scripts and the notebooks, on the double."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from examples.common.running import rows
from tests.conftest import InferenceDouble
from tests.examples.test_notebooks import run as run_notebook
from tests.examples.test_notebooks import shown
from tests.examples.test_two_steps import EXAMPLES, UNCHECKED, run
from tests.journeywork.art.kit import Up

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning"),
]

BASES = {"auto_rl": "support", "mcp_rl": "mcp_rl"}


ENDED = """SELECT (SELECT count(DISTINCT group_id) FROM trajectories WHERE split = 'train') AS groups,
  (SELECT count(DISTINCT group_id) FROM lineage) AS trained,
  (SELECT count(*) FROM group_discarded WHERE reason = 'no_variance') AS equal"""
"""The double answers at random: all attempts of a group may be worth the same, and then it trains nothing."""


@pytest.fixture(scope="module", params=BASES)
def double(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InferenceDouble]:
    """A double of the example's tiny model, which replies with words of its task."""
    name = BASES[request.param]
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    base = folder / "model"
    run(f"examples.{name}.make_model", "--steps", "0", "--out", str(base))
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([word for word in EXAMPLES[name] if len(tokenizer(word).input_ids) > 1])
    tokenizer.save_pretrained(base)
    server = InferenceDouble(folder, args=("--end-every", "2", "--words", *EXAMPLES[name]))
    server.base, server.model = base, request.param
    server.start()
    yield server
    server.stop()


def test_a_script_trains_two_steps_and_compares_held_out_scenarios(
    double: InferenceDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("JOURNEYWORK_URL", raising=False)
    run_dir = tmp_path / "run"
    said = run(
        f"examples.{double.model}.train", "--steps", "2", "--held-out", "4", *UNCHECKED, "--run-dir", str(run_dir),
        "--base", str(double.base), "--config", "examples/common/two_cores.toml", "--vllm-url", double.url,
    )  # fmt: skip
    assert re.search(r"less that of the base model: -?\d\.\d+ \[.*\] over 4", said)
    home = run_dir / double.model / "models" / double.model / "journeywork"
    (ended,) = rows(home, ENDED)
    assert ended["groups"] == ended["trained"] + ended["equal"]


def test_a_notebook_runs_to_its_end(
    double: InferenceDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"vllm.max_model_len": 256, "trainer.lora.rank": 8, "trainer.logprob_bound": 1000}
    named = {"models.0.name": double.model, "models.0.base": str(double.base), "ui.port": 0}
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    up = Up(tmp_path / "run", double.url, **settings, **named)
    try:
        cells = run_notebook(
            f"{double.model}.ipynb", tmp_path, monkeypatch, JOURNEYWORK_URL=up.wait(), BASE_MODEL=str(double.base),
            STEPS="2", HELD_OUT="4", MAX_TOKENS="24",
        )  # fmt: skip
    finally:
        up.stop()
    assert "step 2: mean score" in shown(cells[-3])
    assert re.search(r"difference: -?\d\.\d+ \[.*\] over 4", shown(cells[-2]))
    (ended,) = up.sql(ENDED)
    assert ended["groups"] == ended["trained"] + ended["equal"]
