"""`journeywork init`. `tests/examples/test_notebooks.py` trains and evaluates a project."""

import sys
import tomllib
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from journeywork.starter import command
from journeywork.starter.command import FILES, InitError, main, write_project
from pipeline.config import load
from tests.conftest import InferenceDouble
from tests.kits.installation import program, up


@pytest.mark.slow
def test_a_project_has_its_name_and_its_test_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["support"])
    assert "cd support" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "support").iterdir()) == sorted(FILES)
    texts = [p.read_text() for p in (tmp_path / "support").iterdir()]
    assert not any("starter_model" in text for text in texts)
    assert 'MODEL = "support"' in (tmp_path / "support" / "agent.py").read_text()
    # A project's test needs no plugin, and those that are installed here take longer to import than it runs.
    tested = [sys.executable, "-m", "pytest", "-q", "-W", "error"]
    assert "6 passed" in program(tested, tmp_path / "support", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


@pytest.mark.parametrize("name", ["", "1x", "a/b", "a b", "x" * 65])
def test_what_cannot_be_a_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InitError, match="cannot be a project"):
        write_project(name, tmp_path / "p")


def test_files_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(SystemExit) as ended:
        main(["support", "--dir", str(tmp_path)])
    assert ended.value.code == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(SystemExit) as ended:
        main(["support", "--dir", str(tmp_path / "mine")])
    assert (ended.value.code, "File exists" in capsys.readouterr().err) == (2, True)


def test_a_tiny_project_is_one_for_two_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(command, "make_tiny_model", made.append)
    main(["sums", "--dir", str(tmp_path / "p"), "--tiny"])
    assert made == [tmp_path / "p"]
    settings = tomllib.loads((tmp_path / "p" / "journeywork.toml").read_text("utf-8"))
    assert settings["models"] == [{"name": "sums", "base": "base"}]
    assert settings["trainer"]["groups_per_step"] == 8
    assert settings["trainer"]["optimizer"]["learning_rate"] > 1e-3
    load(tmp_path / "p" / "journeywork.toml")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tiny_project_makes_its_model_and_takes_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model of few steps, before the inference double, which plays the demo's model; the real one needs minutes
    (docs/install.md has the measurement)."""
    project = tmp_path / "p"
    write_project("tictactoe", project, tiny=True)
    program([sys.executable, "make_model.py", "--steps", "2"], project)
    tokenizer = AutoTokenizer.from_pretrained(project / "base")
    assert tokenizer.tokenize("34+7=41") == ["34", "+", "7", "=", "41"]
    assert len(tokenizer.tokenize("I do not know.")) == 1
    run_dir = project / "runs" / "tictactoe"
    own = ["--set", f"models.0.base={InferenceDouble.base}", "--set", "gateway.port=0"]
    with up(tmp_path, run_dir, "--config", "journeywork.toml", *own, cwd=project) as running:
        program([sys.executable, "agent.py", "--passes", "1"], project, JOURNEYWORK_URL=running.url)
        running.until_step(1)
