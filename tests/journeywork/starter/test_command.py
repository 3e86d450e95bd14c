"""`journeywork init`. `tests/examples/test_notebooks.py` trains and evaluates a project."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from journeywork.starter.command import FILES, InitError, main, write_project
from tests.kits.installation import program


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


def test_the_printed_commands_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["support", "--dir", "my agents"])
    assert "\n  cd 'my agents'\n" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "support").write_text("a file")
    with pytest.raises(InitError, match="support is a file"):
        write_project("support", tmp_path / "support")
    with pytest.raises(InitError, match="support/agent cannot be made: Not a directory"):
        write_project("support", tmp_path / "support" / "agent")


def test_a_base_model_in_an_oddly_named_folder_is_a_valid_setting(tmp_path: Path) -> None:
    base = '/models/it\'s "new"\\v1'
    write_project("support", tmp_path / "p", base)
    settings = tomllib.loads((tmp_path / "p" / "journeywork.toml").read_text())
    assert settings["models"][0]["base"] == base


def test_a_base_model_in_a_relative_folder_is_found_from_the_projects_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "v1").mkdir(parents=True)
    for base, written in (("models/v1", str(tmp_path / "models" / "v1")), ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B")):
        project = tmp_path / base.replace("/", "-")
        write_project("support", project, base)
        settings = tomllib.loads((project / "journeywork.toml").read_text("utf-8"))
        assert settings["models"][0]["base"] == written
