"""Programs that other people wrote for ART train two steps each on a real installation, with only imports, counts and
names of models changed.

Their sources are fetched. Where there is no network, the tests are skipped, and say so."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.conftest import DOUBLE, InferenceDouble, VllmServer
from tests.journeywork.art import programs
from tests.journeywork.art.kit import ROOT, Up
from tests.journeywork.art.programs import PROGRAMS, Program
from tests.journeywork.art.programs.base import LENGTH, make_base
from tests.kits.scoring_server import Scorer, ScoringServer
from tests.rollout_gateway.conftest import unload_all

pytestmark = [pytest.mark.anyio, pytest.mark.inference, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    make_base(folder, list(PROGRAMS.values()), 0 if DOUBLE else 100)
    return folder


@pytest.fixture(scope="module")
def vllm(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer | None]:
    """One vLLM for all programs, which serves the base under the name of each; `None` for doubles."""
    if DOUBLE:
        yield None
        return
    names = sorted({f"{program.model}@0" for program in PROGRAMS.values()})
    more = ("--max-model-len", str(LENGTH), "--served-model-name", *names)
    server = VllmServer(tmp_path_factory.mktemp("vllm"), args=more)
    server.base = base
    server.start()
    yield server
    server.stop()


@contextlib.contextmanager
def inference(program: Program, base: Path, vllm: VllmServer | None, folder: Path) -> Iterator[str]:
    """The URL of an inference server that knows the program's replies."""
    if vllm is not None:
        try:
            yield vllm.url
        finally:
            unload_all(vllm)
        return
    words = ("--end-every", "2", "--max-model-len", str(LENGTH), "--words", *program.replies)
    double = InferenceDouble(folder, args=words)
    double.base, double.model = base, program.model
    double.start()
    try:
        yield double.url
    finally:
        double.stop()


FEW = ("yes-no-maybe", "sft-warmup", "tic-tac-toe")
"""Run with all other tests. The rest takes a minute each: JOURNEYWORK_TEST_PROGRAMS=all runs them too."""


@pytest.mark.parametrize("name", PROGRAMS if os.environ.get("JOURNEYWORK_TEST_PROGRAMS") == "all" else FEW)
async def test_a_program_trains_two_steps(
    name: str, base: Path, vllm: VllmServer | None, tmp_path: Path
) -> None:
    program = PROGRAMS[name]
    folder = tmp_path / "program"
    folder.mkdir()
    try:
        file = programs.write(program, folder)
    except OSError as error:
        pytest.skip(f"{name} can't be fetched from {program.repo}: {error}")
    # The double's logprobs are no model's.
    bound = {"trainer.logprob_bound": 1000} if DOUBLE else {}
    settings = {
        "models.0.name": program.model, "models.0.base": str(base), "vllm.max_model_len": LENGTH, "vllm.max_loras": 3,
        "trainer.max_staleness": 1, **bound,
    }  # fmt: skip
    with inference(program, base, vllm, tmp_path) as url:
        up = Up(tmp_path / "run", url, **settings)
        try:
            async with ScoringServer(answer).run() as judge:
                environment = {
                    "JOURNEYWORK_URL": up.wait(), "BASE_MODEL": str(base), "HOME": str(tmp_path),
                    "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "none", "OPENAI_BASE_URL": judge.url,
                    "OPENROUTER_API_BASE": judge.url, "WANDB_API_BASE": judge.url, **program.env,
                }  # fmt: skip
                command = [sys.executable, "-m", "tests.journeywork.art.programs.runner", str(file)]
                done = await anyio.run_process(command, cwd=folder, env=os.environ | environment, check=False)
            assert done.returncode == 0, done.stdout.decode()[-2000:] + done.stderr.decode()[-4000:]
        finally:
            up.stop()
    steps = up.sql("SELECT step, groups FROM checkpoints ORDER BY step")
    assert [row["step"] for row in steps][:2] == [1, 2]
    check_copies(up.sql("SELECT trajectory, copied_from, sampled_ids, prompt_ids FROM rollout_exchange"))


def answer(request: dict[str, Any]) -> Any:
    """What a judge, or a model that writes inputs and instructions, would answer."""
    asked = str(request["messages"])
    if "BEGIN" in asked:
        return Scorer()(request)
    if "input examples" in asked:
        return json.dumps({"inputs": [{"input": f"Check the grammar of text {n}."} for n in range(2)]})
    if "golden answer" in asked:
        return "1" if "short" in asked.partition("generated answer")[2] else "0"
    return "It is short." if "It is short." in asked else "Correct the grammar."


def check_copies(calls: list[dict[str, Any]]) -> None:
    """Trained are the tokens that were sampled."""
    originals = Counter(key(call) for call in calls if not call["copied_from"])
    copies = Counter(key(call) for call in calls if call["copied_from"])
    assert copies
    assert copies.keys() <= originals.keys()


def key(call: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(call["prompt_ids"]), tuple(call["sampled_ids"])
