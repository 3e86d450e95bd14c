"""One real vLLM engine with the plugin, and the same engine with vLLM's own kernels."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm with the plugin")]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the engine of `engine_child` computed. vLLM finds the plugin by the installed entry point."""
    command = [sys.executable, "-m", "tests.rollout_gateway.vllm_plugin.engine_child"]
    done = subprocess.run(
        [*command, str(tmp_path_factory.mktemp("adapters"))],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


Answers = list[tuple[list[int], list[float]]]


def logprob_difference(some: Answers, others: Answers) -> float:
    pairs = ((a, b) for (_, x), (_, y) in zip(some, others, strict=True) for a, b in zip(x, y, strict=True))
    return max(abs(a - b) for a, b in pairs)


def token_ids(answers: Answers) -> list[list[int]]:
    return [ids for ids, _ in answers]


ROUNDING = 192 * 10 * 2 * 1.2e-7
"""A logit is a sum over 192 float32 products below about 10, and a logprob the difference of two such sums."""


def test_vllm_loads_the_plugin(report: dict[str, Any]) -> None:
    assert report["layers"] == ["GroupedPunicaWrapper"]


def test_the_layers_equal_those_of_vllm(report: dict[str, Any]) -> None:
    assert 0 < report["worst_layer"] <= 1


@pytest.mark.parametrize("batch", ["alone", "one", "mixed"])
def test_an_engine_samples_the_same_tokens(report: dict[str, Any], batch: str) -> None:
    """12 prompts at once, greedy and sampled: of the base model; of one adapter; of two and the base model in turns,
    with one slot empty."""
    ours, theirs = report["ours"][batch], report["theirs"][batch]
    assert token_ids(ours) == token_ids(theirs)
    assert logprob_difference(ours, theirs) < ROUNDING
    assert batch == "alone" or token_ids(ours) != token_ids(report["ours"]["alone"])


def test_the_base_model_stays_itself_beside_full_slots(report: dict[str, Any]) -> None:
    """In a batch with three adapters, vLLM's kernels give the base model's requests the adapter in the last slot."""
    ours, theirs, alone = (
        answers[3::4] for answers in (report["ours"]["full"], report["theirs"]["full"], report["ours"]["alone"])
    )
    assert token_ids(ours) == token_ids(alone)
    assert logprob_difference(ours, alone) < ROUNDING
    assert token_ids(theirs) != token_ids(alone)
