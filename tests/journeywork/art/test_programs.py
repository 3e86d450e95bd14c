"""Programs that were written for ART, with only their imports changed, train two steps each on a real installation."""

from __future__ import annotations

import re
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DOUBLE, VllmServer
from tests.journeywork.art.kit import BASE, MODEL, Up
from tests.kits.scoring_server import ScoringServer
from tests.rollout_gateway.conftest import unload_all

pytestmark = [pytest.mark.anyio, pytest.mark.inference, pytest.mark.slow, pytest.mark.timeout(500)]

PROGRAMS = Path(__file__).parent / "programs"


def load(name: str) -> types.ModuleType:
    """The program, with `journeywork.art` in place of `art`."""
    text = (PROGRAMS / f"{name}.py").read_text()
    ours = re.sub(r"^import art$", "import journeywork.art as art", text, flags=re.MULTILINE)
    ours = re.sub(r"^from art\b", "from journeywork.art", ours, flags=re.MULTILINE)
    changed = [a for a, b in zip(text.splitlines(), ours.splitlines(), strict=True) if a != b]
    assert changed
    assert all(line.startswith(("import art", "from art")) for line in changed)
    module = types.ModuleType(name)
    exec(compile(ours, name, "exec"), module.__dict__)
    return module


@pytest.fixture
def installation(tmp_path: Path, vllm_server: VllmServer) -> Iterator[Up]:
    # The double's logprobs are no model's.
    bound = {"trainer.logprob_bound": 1000} if DOUBLE else {}
    up = Up(tmp_path / "run", vllm_server.url, **{"vllm.max_loras": 3, "trainer.max_staleness": 1, **bound})
    try:
        yield up
    finally:
        up.stop()
        unload_all(vllm_server)


async def test_programs_run_with_only_the_import_changed(
    installation: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JOURNEYWORK_URL", installation.wait())
    monkeypatch.setenv("BASE_MODEL", str(BASE))
    async with ScoringServer().run() as judge:
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{judge.port}/v1")
        rates = [await load(name).__dict__["main"]() for name in ("tic_tac_toe", "twenty48", "ruler_agent")]
    assert rates == [[2e-3] * 2, [1e-3] * 2, [1e-3] * 2]
    installation.stop()  # the store writes what it has

    steps = installation.sql(f"SELECT step, groups FROM checkpoints WHERE model = '{MODEL}' ORDER BY step")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert all(len(row["groups"]) == 2 for row in steps), (
        "a step did not train the groups of one call of train"
    )
    trained = {group for row in steps for group in row["groups"]}
    runs = installation.sql(
        "SELECT trajectory, group_id, split, reward FROM trajectories WHERE reward IS NOT NULL"
    )
    assert Counter(run["group_id"] in trained for run in runs if run["split"] == "train") == {
        True: 2 * 2 * 4 + 2 * 2 * 4 + 2 * 2 * 3
    }
    assert sum(run["split"] == "val" for run in runs) == 2
    calls = installation.sql("SELECT trajectory, copied_from, sampled_ids, prompt_ids FROM rollout_exchange")
    check_copies(calls, {run["trajectory"] for run in runs})


def check_copies(calls: list[dict[str, Any]], runs: set[str]) -> None:
    """Trained are the tokens that were sampled, and drafts that no trajectory holds are not."""
    originals = Counter(key(call) for call in calls if not call["copied_from"])
    copies = Counter(key(call) for call in calls if call["copied_from"])
    assert copies <= originals
    assert {call["trajectory"] for call in calls if call["copied_from"]} == runs
    assert originals.total() - copies.total() == 2 * 2 * 3, "the drafts of the RULER program"


def key(call: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(call["prompt_ids"]), tuple(call["sampled_ids"])
