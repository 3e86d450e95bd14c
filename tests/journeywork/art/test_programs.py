"""Programs that other people wrote for ART train two steps each on an installation before the double, with only
imports, counts and names of models changed.

Their sources are fetched. Where there is no network, the tests are skipped, and say so."""

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

from tests.conftest import InferenceDouble
from tests.journeywork.art import programs
from tests.journeywork.art.kit import ROOT, installation
from tests.journeywork.art.programs import PROGRAMS, Program
from tests.kits.scoring_server import Scorer, ScoringServer
from tests.kits.services import serving
from trainer import tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH = 8192
"""Tokens of prompt and reply together."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model with random weights, whose tokenizer has a token for each reply of the programs."""
    folder = tmp_path_factory.mktemp("base") / "model"
    tokenizer = tiny.make_tokenizer(sorted({reply for p in PROGRAMS.values() for reply in p.replies}), LENGTH)
    model = tiny.make_model(tokenizer, 0, width=128, mlp=384)
    model.config.max_position_embeddings = LENGTH
    tiny.save(model, tokenizer, folder)
    return folder


@contextlib.contextmanager
def inference(program: Program, base: Path, folder: Path) -> Iterator[str]:
    """The URL of a double that gives the program's replies."""
    double = InferenceDouble(
        folder, args=("--end-every", "2", "--max-model-len", str(LENGTH), "--words", *program.replies)
    )
    double.base, double.model = base, program.model
    with serving(double):
        yield double.url


FEW = ("sft-warmup",)
"""Run with all other tests: it tunes on examples, then trains on rewards. The rest takes a minute each, with
JOURNEYWORK_TEST_PROGRAMS=all."""


@pytest.mark.parametrize("name", PROGRAMS if os.environ.get("JOURNEYWORK_TEST_PROGRAMS") == "all" else FEW)
async def test_a_program_trains_two_steps(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    program = PROGRAMS[name]
    folder = tmp_path / "program"
    folder.mkdir()
    try:
        file = programs.write(program, folder)
    except OSError as error:
        pytest.skip(f"{name} can't be fetched from {program.repo}: {error}")
    base: Path = request.getfixturevalue("base")  # only for a program that could be fetched
    settings = {
        "models.0.name": program.model,
        "models.0.base": str(base),
        "vllm.max_model_len": LENGTH,
        "vllm.max_loras": 3,
        "trainer.max_staleness": 1,
    }
    async with ScoringServer(answer).run() as judge:
        with inference(program, base, tmp_path) as url, installation(tmp_path / "run", url, **settings) as up:
            environment = {
                "JOURNEYWORK_URL": up.url,
                "BASE_MODEL": str(base),
                "HOME": str(tmp_path),
                "PYTHONPATH": str(ROOT),
                "OPENAI_API_KEY": "none",
                "OPENAI_BASE_URL": judge.url,
                "OPENROUTER_API_BASE": judge.url,
                "WANDB_API_BASE": judge.url,
                **program.env,
            }
            command = [sys.executable, "-m", "tests.journeywork.art.programs.runner", str(file)]
            done = await anyio.run_process(command, cwd=folder, env=os.environ | environment, check=False)
        assert done.returncode == 0, done.stdout.decode()[-2000:] + done.stderr.decode()[-4000:]
    steps = up.query("SELECT step, groups FROM checkpoints ORDER BY step")
    assert [row["step"] for row in steps][:2] == [1, 2]
    check_copies(up.query("SELECT trajectory, copied_from, sampled_ids, prompt_ids FROM rollout_exchange"))


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
