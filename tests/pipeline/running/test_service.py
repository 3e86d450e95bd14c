"""How a service process ends: 0 when stopped, 2 on settings that can't be used, 1 on a crash."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.running import service

SERVICE = """
import anyio, sys
from pipeline.config import ConfigError
from pipeline.running.service import main

async def fails(error):
    raise error

async def serve(config, ready):
    async with anyio.create_task_group() as tg:
        for error in {errors}:
            tg.start_soon(fails, error)

main("made_up", serve)
"""


@pytest.mark.parametrize(
    ("errors", "code", "said"),
    [
        ("[ConfigError('judge.model: no such thing')]", 2, "judge.model: no such thing\n"),
        ("[RuntimeError('broken')]", 1, "RuntimeError: broken"),
        ("[ConfigError('one'), RuntimeError('broken')]", 1, "RuntimeError: broken"),
        ("[]", 0, ""),
    ],
)
def test_settings_that_serving_finds_unusable_are_told_from_a_crash(
    tmp_path: Path, errors: str, code: int, said: str
) -> None:
    (tmp_path / "settings.toml").write_text(f'run_dir = "{tmp_path}"\n')
    done = subprocess.run(
        [sys.executable, "-c", SERVICE.format(errors=errors), "--config", str(tmp_path / "settings.toml")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    if code == 2:
        assert done.stderr == said  # and no traceback
    else:
        assert said in done.stdout + done.stderr


def test_a_service_checks_its_settings_at_each_start(tmp_path: Path) -> None:
    """With this exit code the supervisor stops and prints what the service said."""
    settings = tmp_path / "settings.toml"
    settings.write_text(
        f'run_dir = "{tmp_path}"\n[nats]\nurl = "nats://127.0.0.1:1"\nconnect_timeout_s = 1.0\n[store]\ndir = "s3://"\n'
    )
    command = [sys.executable, "-m", "store", "--config", str(settings)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "store.dir: 's3://' names no bucket" in done.stderr


def test_a_second_report_needs_no_reader() -> None:
    """A trainer that waited for another reports again when it takes over; its launcher may have read the first line and
    closed the pipe."""
    readable, writable = os.pipe()
    report = service._Report(writable)
    report(step=0)
    assert os.read(readable, 1000) == b'{"ready":true,"step":0}\n'
    os.close(readable)
    report(step=3)
    os.close(writable)
