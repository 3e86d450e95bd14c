"""RULER of a program that was written for ART: the judge of an installation, in one process for the whole program."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from journeywork.art.rewards import judge_process, ruler
from tests.kits.scoring_server import Scorer, ScoringServer


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No judge runs yet; the test's own ends with the test."""
    monkeypatch.setattr(judge_process, "_process", None)
    yield
    if judge_process._process is not None:
        judge_process._process.close()


def said(*qualities: float) -> list[list[Any]]:
    return [[{"role": "user", "content": f"quality={quality}"}] for quality in qualities]


async def test_scores_are_those_of_the_judge_without_the_effect_of_positions() -> None:
    """Settings by litellm's names reach the judge; the key goes by the environment, not by the command line."""
    async with ScoringServer(Scorer(first_bonus=0.3), keep=True).run() as server:
        params = {"api_base": server.url, "api_key": "k-1", "timeout": 30, "seed": 4}
        params |= {"base_url": None, "temperature": None, "max_tokens": None}  # as if they were not given
        scores = await ruler(said(0.2, 0.6), "openai/scorer", params, "- my rubric")
        assert [s.trajectory_id for s in scores] == ["1", "2"]
        # Two passes in two orders: each attempt was first once.
        assert [s.score for s in scores] == pytest.approx([0.35, 0.75])
        assert {r["seed"] for r in server.requests} == {4}
        assert all("- my rubric" in r["messages"][0]["content"] for r in server.requests)
        assert {h["authorization"] for h in server.headers} == {"Bearer k-1"}


async def test_one_process_scores_all_groups_each_with_its_own_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same time, with keys of their own, one from a variable that was set meanwhile."""
    async with ScoringServer(keep=True).run() as server, ScoringServer(lambda _: 500).run() as broken:

        async def score(quality: float, url: str, **params: object) -> float | str:
            asked = {"api_base": url, "num_retries": 0, **params}
            try:
                (only,) = await ruler(said(quality), "openai/scorer", asked)
            except ValueError as error:
                return str(error)
            return only.score

        assert await score(0.1, server.url, api_key="k-1") == pytest.approx(0.1)
        process = judge_process._process
        monkeypatch.setenv("SET_LATER", "k-2")
        *scores, why = await asyncio.gather(
            score(0.2, server.url, extra_headers={"authorization": "Bearer ${SET_LATER}"}),
            *(score(n / 10, server.url, api_key=f"k-{n}") for n in range(3, 8)),
            score(0.5, broken.url),
        )
        assert scores == pytest.approx([n / 10 for n in range(2, 8)])
        assert "InternalServerError" in str(why)
        assert {h["authorization"] for h in server.headers} == {f"Bearer k-{n}" for n in range(1, 8)}
        assert judge_process._process is process
        assert "expected `float`" in str(await score(0.1, server.url, timeout="soon"))


async def test_a_process_that_dies_is_started_again_and_its_groups_are_scored(new_process: None) -> None:
    killed: list[int] = []

    def kill_once(request: Any) -> str | int:
        if not killed:
            assert judge_process._process is not None
            killed.append(judge_process._process._process.pid)
            os.kill(killed[0], signal.SIGKILL)
        return Scorer()(request)

    async with ScoringServer(kill_once).run() as server:
        asked = {"api_base": server.url}
        scores = await asyncio.gather(*(ruler(said(q), "openai/scorer", asked) for q in (0.2, 0.4)))
    assert [score.score for (score,) in scores] == pytest.approx([0.2, 0.4])
    assert len(killed) == 1


async def test_an_answer_that_never_comes_ends_the_wait(monkeypatch: pytest.MonkeyPatch, new_process: None) -> None:
    monkeypatch.setattr(judge_process, "_ANSWER_S", 0.2)
    async with ScoringServer(delay_s=600).run() as server:
        with pytest.raises(ValueError, match="did not answer within"):
            await ruler(said(0.5), "openai/scorer", {"api_base": server.url})
