"""Unsloth comes before the libraries that it patches. A stand-in notes what was imported before it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import config as configuration
from pipeline.config import Config, ConfigError, ModelConfig, TrainerConfig
from tests.trainer import kit
from trainer.first import import_first

_STAND_IN = """
import os, sys
early = [n for n in ("transformers", "peft", "trl") if n in sys.modules]
open(os.environ["SEEN"], "w").write("early: " + ",".join(early))
raise SystemExit(7)
"""


@pytest.mark.parametrize(
    "command",
    [
        "-m trainer --config {}",
        "-m trainer.commands.train --config {} --set nats.url=nats://x:1",
        "-m trainer.commands.check_model base --config {}",
    ],
)
@pytest.mark.slow
def test_nothing_that_unsloth_patches_is_imported_before_it(tmp_path: Path, command: str) -> None:
    (tmp_path / "unsloth.py").write_text(_STAND_IN)
    configuration.save(kit.settings("base", tmp_path, engine="unsloth"), tmp_path / "config.toml")
    seen = tmp_path / "seen"
    path = os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)])
    done = subprocess.run(
        [sys.executable, *command.format(tmp_path / "config.toml").split()],
        env=os.environ | {"PYTHONPATH": path, "SEEN": str(seen)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert seen.read_text() == "early: "


def _config(**trainer: object) -> Config:
    return Config(models=(ModelConfig(base="b"), ModelConfig(name="c", base="b", trainer=dict(trainer))))


def test_importing_unsloth_late_or_not_having_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import_first(_config())  # wants none
    monkeypatch.setitem(sys.modules, "peft", sys)
    with pytest.raises(RuntimeError, match=r"unsloth has to be imported before .*peft"):
        import_first(_config(engine="unsloth"))
    for name in ("transformers", "peft", "trl"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match="unsloth is not installed"):
        import_first(Config(models=(ModelConfig(base="b"),), trainer=TrainerConfig(engine="unsloth")))
