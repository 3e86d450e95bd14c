"""`journeywork fork`: which version a source names, and the settings of the installation that begins with it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from pyarrow import fs

from journeywork import forking
from journeywork.forking import ForkError, settings_of
from pipeline.commands import main as cli
from pipeline.config import load
from pipeline.versions.lake_files import ADAPTER, EVENT, checkpoint_folder
from tests.store.conftest import object_store, s3_server
from trainer.checkpoints.checkpoint import pack

__all__ = ["object_store", "s3_server"]  # fixtures


def add_version(
    lake: Path, project: str, name: str, step: int, files: tuple[str, ...] = (ADAPTER, EVENT), *, branch: str = "main"
) -> None:
    folder = lake / checkpoint_folder(project, branch, name, step)
    folder.mkdir(parents=True)
    for file in files:  # the event is written last: without it, the copy is not whole
        (folder / file).write_bytes(
            pack(
                {
                    "adapter_config.json": b'{"r": 4, "lora_alpha": 8, "base_model_name_or_path": "b"}',
                    "adapter_model.safetensors": b"%d" % step,
                }
            )
            if file == ADAPTER
            else b"%d" % step
        )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose lake has versions 1, 2 and 40 of `m`, and 7 of `m` on another branch."""
    for step in (1, 2, 40):
        add_version(tmp_path / "store", "p.1", "m", step)
    add_version(tmp_path / "store", "p.1", "m", 7, branch="tried")
    return tmp_path


@pytest.mark.parametrize(
    ("names", "version"),
    [("", "p.1/main/m@40"), ("#m", "p.1/main/m@40"), ("#m@2", "p.1/main/m@2"), ("#p.1/tried/m", "p.1/tried/m@7")],
)
def test_a_source_names_a_version(run: Path, names: str, version: str) -> None:
    assert settings_of(f"{run}{names}") == {
        "project": "p.1",
        "models.0.name": "m",
        "models.0.base": "b",
        "models.0.start": f"{run / 'store'}#{version}",
        "trainer.lora.rank": 4,
        "trainer.lora.alpha": 8,
    }


def test_the_arguments_are_settings_that_up_takes_and_later_ones_win(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[str] = []
    monkeypatch.setattr(forking.os, "execv", lambda _, command: became.extend(command))
    forking.main([f"{run}#m@2", "--run-dir", str(run / "fork"), "--set", 'models.0.name="n"'])
    assert became[1:6] == ["-m", "pipeline", "up", "--run-dir", str(run / "fork")]
    config = load(None, [value for flag, value in itertools.pairwise(became) if flag == "--set"])
    assert (config.project, config.models[0].name, config.models[0].base) == ("p.1", "n", "b")
    assert config.models[0].start == f"{run / 'store'}#p.1/main/m@2"
    assert (config.trainer.lora.rank, config.trainer.lora.alpha) == (4, 8.0)


@pytest.mark.parametrize("name", ["m", "qwen2.5", "Größe ~x"])
def test_the_newest_whole_version_of_every_name_is_found(name: str, tmp_path: Path) -> None:
    for step, files in ((1, (ADAPTER, EVENT)), (12, (ADAPTER, EVENT)), (13, (ADAPTER,))):
        add_version(tmp_path, "p.1", name, step, files)
    assert str(settings_of(str(tmp_path))["models.0.start"]).endswith("@12")


def test_a_version_in_object_storage_is_a_source(
    run: Path, object_store: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_store["s3_endpoint"])
    bucket, root = fs.FileSystem.from_uri(object_store["dir"])
    fs.copy_files(str(run / "store"), root, fs.LocalFileSystem(), bucket)
    assert settings_of(f"{object_store['dir']}#m@2")["models.0.start"] == f"{object_store['dir']}#p.1/main/m@2"


def test_names_with_a_slash_are_escaped(tmp_path: Path) -> None:
    add_version(tmp_path, "p/1", "org/m", 3)
    add_version(tmp_path, "p/1", "other", 4)
    for names in ("org%2Fm", "p%2F1/main/org%2Fm@3"):
        settings = settings_of(f"{tmp_path}#{names}")
        assert (settings["project"], settings["models.0.name"]) == ("p/1", "org/m")
        assert settings["models.0.start"] == f"{tmp_path}#p%2F1/main/org%2Fm@3"
    with pytest.raises(ForkError, match=r"several models .* p%2F1/main/org%2Fm, p%2F1/main/other"):
        settings_of(str(tmp_path))
    with pytest.raises(ForkError, match=r"a slash within a name as %2F"):
        settings_of(f"{tmp_path}#p/1/main/org/m@3")


def test_the_source_may_stand_after_options_of_up(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[str] = []
    monkeypatch.setattr(forking.os, "execv", lambda _, command: became.extend(command))
    options = ["--set", "a=b", "--services", "store", "--dry-run", "--set", "c=d"]
    forking.main([*options, f"{run}#m@2", "--run-dir", str(run / "fork")])
    assert became[-7:] == ["--dry-run", "--services", "store", "--set", "a=b", "--set", "c=d"]
    assert f'models.0.start="{run / "store"}#p.1/main/m@2"' in became
    (commands,) = cli._parser()._subparsers._group_actions  # type: ignore[union-attr]
    of_up = commands.choices["up"]._actions  # type: ignore[index, call-overload]
    with_value = {option for a in of_up if a.nargs is None for option in a.option_strings}
    assert with_value - {"--run-dir"} == {*forking._OF_UP}


def test_a_peft_folder_is_a_source(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4, "base_model_name_or_path": "b"}')
    assert settings_of(str(tmp_path)) == {
        "models.0.start": str(tmp_path),
        "models.0.base": "b",
        "trainer.lora.rank": 2,
        "trainer.lora.alpha": 4,
    }


def test_a_fork_of_an_adapter_on_experts_has_one_too(tmp_path: Path) -> None:
    adapter = '{"r": 2, "lora_alpha": 4, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}'
    (tmp_path / "adapter_config.json").write_text(adapter)
    assert settings_of(str(tmp_path))["trainer.lora.experts"] is True


def test_what_cannot_be_forked_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lake = str(run / "store")
    with pytest.raises(
        ForkError, match=r"no version that can be forked as \*/main/m@3; it has: p.1/main/m, p.1/tried/m"
    ):
        settings_of(f"{lake}#m@3")
    add_version(run / "store", "p.1", "other", 1)
    with pytest.raises(ForkError, match=r"several models .* p.1/main/m, p.1/main/other"):
        settings_of(lake)
    (run / "config.toml").touch()
    with pytest.raises(SystemExit) as ended:
        forking.main([lake, "--run-dir", str(run)])
    assert ended.value.code == 2
    assert "has begun already" in capsys.readouterr().err
