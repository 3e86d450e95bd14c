"""RULER of a program that was written for ART: the judge of an installation, called as a command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from journeywork.art.rewards import ruler
from tests.kits.scoring_server import Scorer, ScoringServer

pytestmark = pytest.mark.anyio


async def test_scores_are_those_of_the_judge_without_the_effect_of_positions() -> None:
    """Settings by litellm's names reach the judge; the key goes by the environment, not by the command line."""
    async with ScoringServer(Scorer(first_bonus=0.3), keep=True).run() as server:
        params = {"api_base": server.url, "api_key": "k-1", "timeout": 30, "seed": 4}
        scores = await ruler(
            [[{"role": "user", "content": f"quality={q}"}] for q in (0.2, 0.6)],
            "openai/scorer", params, "- my rubric",
        )  # fmt: skip
        assert [s.trajectory_id for s in scores] == ["1", "2"]
        # Two passes in two orders: each attempt was first once.
        assert [s.score for s in scores] == pytest.approx([0.35, 0.75])
        assert {r["seed"] for r in server.requests} == {4}
        assert all("- my rubric" in r["messages"][0]["content"] for r in server.requests)
        assert {h["authorization"] for h in server.headers} == {"Bearer k-1"}


async def test_a_single_trajectory_has_a_score() -> None:
    async with ScoringServer().run() as server:
        (score,) = await ruler(
            [[{"role": "user", "content": "quality=0.4"}]], "openai/scorer", {"api_base": server.url}
        )
    assert score.score == pytest.approx(0.4)


async def test_without_the_judge_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "executable", str(Path(sys.base_prefix, "bin", "python3"))
    )  # no judge is installed there
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"install journeywork\[judge\]"):
        await ruler([[{"role": "user", "content": "a"}]], "anthropic/x")
