"""`journeywork judge eval`."""

import json
from pathlib import Path

import pytest

from judge.commands import main as command
from judge.commands.eval import evaluate
from judge.labelled import read_labelled
from pipeline.config import JudgeConfig
from tests.judge.kit import Model, labelled
from tests.kits.scoring_server import Scorer


async def test_a_good_and_a_bad_judge_are_told_apart(tmp_path: Path) -> None:
    config = JudgeConfig(model="test/judge")
    good = await evaluate(config, read_labelled(labelled(tmp_path / "a")), Model(Scorer()))
    assert (good["groups"], good["kendall_tau"], good["pairwise_accuracy"], good["sign_flips"]) == (4, 1.0, 1.0, 0.0)
    assert good["cost_usd"] == pytest.approx(0.008)
    assert (good["calls"], good["self_agreement"], good["latency_p50_s"]) == (8, 1.0, 0.05)
    bad = await evaluate(config, read_labelled(labelled(tmp_path / "b", wrong=True)), Model(Scorer()))
    assert bad["kendall_tau"] == -1.0
    failing = await evaluate(config, read_labelled(tmp_path / "a"), Model(lambda _: 500))
    assert (failing["groups"], failing["failed"]) == (0, 4)


def test_the_command_reports_and_exits_by_the_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def make(config: JudgeConfig) -> Model:
        return Model(Scorer())

    monkeypatch.setattr("judge.commands.eval.open_judge_model", make)
    data = str(labelled(tmp_path / "x.jsonl"))
    command.main(["eval", data, "--set", "judge.model=test/judge", "--json"])
    assert json.loads(capsys.readouterr().out)["groups"] == 4
    command.main(["eval", data, "--set", "judge.model=test/judge", "--set", "judge.passes=1"])
    assert "\nself_agreement         -\n" in capsys.readouterr().out  # no two passes to compare
    equal = json.loads(Path(data).read_text().splitlines()[0])
    for run in equal["trajectories"]:
        run["reward"] = 1.0
    (tmp_path / "equal.jsonl").write_text(json.dumps(equal))
    for file, bound in ((data, "1.5"), (str(tmp_path / "equal.jsonl"), "-1")):
        with pytest.raises(SystemExit, match=r"^1$"):
            command.main(["eval", file, "--set", "judge.model=test/judge", "--min-tau", bound])
    assert "\nkendall_tau            -\n" in capsys.readouterr().out  # no two rewards differ
    with pytest.raises(SystemExit, match=r"^2$"):
        command.main(["eval", data])
    assert "judge.model is not set" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^2$"):
        command.main(["eval", data, "--set", "judge.model=test/judge", "--reward", "style"])
    assert "'style' is no reward of kind ruler or next_state; there are: none" in capsys.readouterr().err
