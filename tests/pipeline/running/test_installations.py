"""The run that a command selects, and how it finds the run's log."""

import argparse
import json
import os
from pathlib import Path

import pytest

from pipeline.config import Config, ConfigError, ModelConfig, save
from pipeline.running.gateway_api import connect
from pipeline.running.installations import find_installation, installation_settings, log_of, require_same_bases
from pipeline.running.state import ProcessState, RunState, process_start, read_state, write_state


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `runs` of the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def make(folder: Path, *, settings: str = "", address: str = "") -> Path:
    """A run directory with the given settings, and with the address of a log that `journeywork up` started."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(settings)
    if address:
        (folder / "state.json").write_text(json.dumps({"urls": {"nats": address}}))
    return folder


def test_without_a_run_the_error_says_what_to_do(runs: Path) -> None:
    (runs / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no installation under runs/: name one with --run-dir"):
        find_installation()
    with pytest.raises(ConfigError, match="runs/empty is no installation"):
        installation_settings("runs/empty")


@pytest.mark.parametrize("sign", ["config.toml", "state.json", "store", "store/group.scored"])
def test_the_newest_run_is_the_one_that_changed_last(runs: Path, sign: str) -> None:
    for name in ("first", "second", "third"):
        (runs / name / "store" / "group.scored").mkdir(parents=True)
        for path in (make(runs / name, address="nats://a:1"), *(runs / name).rglob("*")):
            os.utime(path, (1, 1))
    os.utime(runs / "second" / sign, (2, 2))
    assert find_installation() == Path("runs/second")
    assert find_installation("elsewhere") == Path("elsewhere")


def test_the_run_that_runs_comes_before_newer_folders(runs: Path) -> None:
    make(runs / "running", address="nats://a:1")
    (runs / "running" / "state.json").write_text(json.dumps({"pid": os.getpid(), "since": process_start(os.getpid())}))
    for path in (runs / "running").iterdir():
        os.utime(path, (1, 1))
    make(runs / "newer", address="nats://b:1")
    assert find_installation() == Path("runs/running")


def test_a_process_that_has_the_id_of_an_ended_one_is_another(runs: Path) -> None:
    pid, now = os.getpid(), process_start(os.getpid())
    assert now
    assert process_start(2**22 + 1) == ""
    boot, _, ticks = now.partition(" ")
    for since, running in ((now, True), (f"{boot} {int(ticks) - 1}", False), (f"another {ticks}", False), ("", False)):
        process = ProcessState(pid=pid, since=since, state="ready")
        write_state(runs, RunState(pid=pid, since=since, services={"trainer": process}))
        state = read_state(runs)
        assert state is not None
        assert (state.running, state.running_pid("trainer")) == (running, pid if running else 0)


def test_the_log_is_the_one_that_was_started_for_the_run(runs: Path) -> None:
    make(runs / "a", settings='project = "x"\n[nats]\nurl = "nats://earlier:1"\n', address="nats://now:1")
    config = installation_settings(overrides=["judge.model=m"])
    assert (config.project, config.judge.model, config.run_dir) == ("x", "m", "runs/a")
    assert log_of(config).url == "nats://now:1"
    assert installation_settings(overrides=["nats.url=nats://set:1"]).nats.url == "nats://set:1"
    assert installation_settings(overrides=["nats={sync=2.0}"]).nats.url == "nats://now:1"


def test_a_stopped_run_has_no_address(runs: Path) -> None:
    """Another run may have its ports by now."""
    folder = make(runs / "a", settings='[nats]\nurl = "nats://before:1"\n')
    services = {"nats": {"state": "stopped"}, "gateway": {"state": "stopped"}}
    urls = {"nats": "nats://now:1", "gateway": "http://now:2"}
    (folder / "state.json").write_text(json.dumps({"urls": urls, "services": services}))
    with pytest.raises(ConfigError, match="or its log is stopped"):
        log_of(installation_settings("runs/a"))
    assert log_of(installation_settings("runs/a", overrides=["nats.url=nats://given:1"])).url == "nats://given:1"
    with pytest.raises(ConfigError, match="runs/a is stopped, or has no gateway: start it with `journeywork up`"):
        connect(argparse.Namespace(url="", run_dir="runs/a", key=""))
    services["nats"]["state"] = services["gateway"]["state"] = "ready"
    (folder / "state.json").write_text(json.dumps({"urls": urls, "services": services}))
    assert log_of(installation_settings("runs/a")).url == "nats://now:1"
    assert connect(argparse.Namespace(url="", run_dir="runs/a", key="")).url == "http://now:2"


def test_a_damaged_state_is_named(runs: Path) -> None:
    make(runs / "a")
    (runs / "a" / "state.json").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^runs/a/state\.json is damaged .*: delete it; `journeywork up`"):
        installation_settings()


def test_settings_in_a_file_of_their_own_come_before_the_runs(runs: Path, tmp_path: Path) -> None:
    make(runs / "a", settings='project = "x"\n', address="nats://now:1")
    (tmp_path / "own.toml").write_text('project = "y"\nrun_dir = "runs/a"\n')
    config = installation_settings(file="own.toml")
    assert (config.project, config.nats.url) == ("y", "nats://now:1")
    (tmp_path / "own.toml").write_text('[nats]\nurl = "nats://own:1"\n')
    config = installation_settings("runs/a", "own.toml")
    assert (config.run_dir, config.nats.url) == ("runs/a", "nats://own:1")


def test_a_command_reads_only_the_sections_that_it_needs(runs: Path) -> None:
    make(runs / "a", settings='project = "x"\n[trainer]\nlora_rank = 4\n[judge]\nno_such = 1\n[store]\ndir = "s"\n')
    with pytest.raises(ConfigError, match=r"trainer\.lora_rank: there is no such setting"):
        installation_settings()
    config = installation_settings(sections=("store",))
    assert (config.project, config.store.dir) == ("x", "s")


def test_settings_of_which_a_command_reads_a_part_are_not_checked_against_the_defaults_of_others(runs: Path) -> None:
    make(
        runs / "large",
        settings="[[models]]\nname = 'm'\nbase = 'b'\n[trainer.lora]\nrank = 64\n[vllm]\nmax_lora_rank = 64\n"
        "[judge]\ntimeout_s = 100000.0\n[nats]\nrollouts_max_age_h = 96.0\n",
    )
    installation_settings()
    assert installation_settings(sections=("models", "trainer")).trainer.lora.rank == 64
    assert installation_settings(sections=("store", "judge")).judge.timeout_s == 100_000


def test_a_run_that_trained_another_base_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for name, hidden in (("old", 64), ("copy", 64), ("new", 128)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"hidden_size": hidden}))

    def with_base(name: str) -> Config:
        return Config(project="p", run_dir=str(tmp_path), models=(ModelConfig(name="m", base=str(tmp_path / name)),))

    require_same_bases(with_base("new"))  # nothing was ever started there
    save(with_base("old"), tmp_path / "config.toml")
    require_same_bases(with_base("new"))  # nothing was trained
    (tmp_path / "checkpoints" / "p" / "main" / "m" / "step-1").mkdir(parents=True)
    require_same_bases(with_base("copy"))
    with pytest.raises(ConfigError, match=r"m was trained on .*old, and .*new is another model: name that one"):
        require_same_bases(with_base("new"))
