"""`journeywork judge score`: one group from a file."""

import json
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import pytest

from judge.commands.main import main
from judge.commands.score import score_group
from judge.errors import UnscoredError
from judge.labelled import GroupFile
from judge.scoring import judge_hash
from pipeline.config import Config, ConfigError, JudgeConfig, RewardConfig
from tests.judge.kit import IMPORTS_LITELLM
from tests.kits.scoring_server import ScoringServer
from tests.kits.settings import with_values

pytestmark = IMPORTS_LITELLM


def said(quality: float) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": f"quality={quality}"}]


GROUP: dict[str, Any] = {
    "task": "win",
    "messages": [{"role": "user", "content": "Win the game."}],
    "trajectories": [
        {"id": "a", "messages": said(0.9)},
        {"messages": said(0.2)},
        {"id": "c", "conversations": [said(0.1), said(0.5)]},
    ],
}


def settings(server: ScoringServer, **fields: Any) -> Config:
    return Config(
        judge=with_values(JudgeConfig(model="openai/scorer", api_base=server.url), {"request.retries": 0, **fields})
    )


async def test_a_group_from_a_file_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "group.json").write_text(json.dumps(GROUP))
    async with ScoringServer(keep=True).run() as server:
        asked = ["score", str(tmp_path / "group.json"), "--set", "judge.model=openai/scorer"]
        await anyio.to_thread.run_sync(main, [*asked, "--set", f"judge.api_base={server.url}"])
    found = json.loads(capsys.readouterr().out)
    assert found["scores"] == pytest.approx({"a": 0.9, "2": 0.2, "c": 0.5})
    assert found["judge"] == judge_hash(settings(server).judge)
    assert found["explanations"]["a"] == ["quality 0.90"] * 2
    assert found["prompt_tokens"] > 0
    shown = server.requests[0]["messages"][1]["content"]
    assert "conversation 2 of 2" in shown
    assert shown.count("Win the game.") == 1


async def test_a_reward_function_is_given_every_conversation() -> None:
    parts = (RewardConfig(name="parts", kind="python", entry="tests.judge.functions:parts", isolate="off"),)
    config = Config(judge=JudgeConfig(rewards=parts))
    found = await score_group(config, msgspec.convert(GROUP, GroupFile))
    assert found.final == {"a": 1.0, "2": 1.0, "c": 2.0}


@pytest.mark.parametrize(
    ("group", "why"),
    [
        ({"trajectories": []}, "at least one trajectory"),
        ({"trajectories": [{"id": "a"}, {"id": "a"}]}, "two trajectories have the id 'a'"),
        ({"trajectories": [{"messages": said(1), "conversations": [said(1)]}, {}]}, "not both"),
    ],
)
async def test_a_group_that_can_t_be_scored_says_why(group: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        await score_group(Config(judge=JudgeConfig(model="x")), msgspec.convert(group, GroupFile))


async def test_a_failing_judge_is_not_retried() -> None:
    async with ScoringServer(lambda _: 500).run() as server:
        with pytest.raises(UnscoredError, match="InternalServerError"), anyio.fail_after(120):
            await score_group(settings(server), msgspec.convert(GROUP, GroupFile))
