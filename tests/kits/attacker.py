"""What an attacker on the same machine finds of an installation: environments, command lines, ports, files."""

import os
import socket
from pathlib import Path
from typing import Any

CANARIES = {
    "OPENAI_API_KEY": {"judge"},  # named by judge.api_key_env
    "AWS_SECRET_ACCESS_KEY": {"store", "ui"},
    "HF_TOKEN": {"vllm", "trainer"},
    "LANGFUSE_SECRET_KEY": {"telemetry"},
    "SOMETHING_ELSE": set[str](),
}
"""Variables that `up` is started with, and the processes that may see them."""


def environment(**more: str) -> dict[str, str]:
    """What `up` is started with: this process's own, and the canaries."""
    given = {name: f"canary-{name}" for name in CANARIES if name != "LANGFUSE_SECRET_KEY"}
    return {**os.environ, **given, **more}


def check_environments(state: dict[str, Any], run_dir: Path) -> None:
    """No process of a running installation sees a variable that its settings do not name, and no command line a
    secret."""
    secrets = [f.read_bytes().strip() for f in run_dir.glob("keys/*")]
    for name, service in state["services"].items():
        lines = Path(f"/proc/{service['pid']}/environ").read_bytes().decode().split("\0")
        command = Path(f"/proc/{service['pid']}/cmdline").read_bytes()
        assert not [s for s in secrets if s in command], name
        seen = dict(line.split("=", 1) for line in lines if "=" in line)
        assert not {c for c in CANARIES if c in seen and name not in CANARIES[c]}, name
        assert "OPENAI_API_KEY" in seen or name != "judge"
        assert ("VLLM_API_KEY" in seen) == (name == "vllm")


def check_stranger(url: str) -> None:
    """Who has no key is refused by NATS."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as stranger:
        stranger.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
        said = b""
        while data := stranger.recv(4096):
            said += data
    assert b"Authorization Violation" in said


def check_files(run_dir: Path) -> None:
    """What a run leaves is its owner's alone, and holds secrets in their own files only."""
    files = [run_dir, *run_dir.rglob("*")]
    assert not [f for f in files if f.stat().st_mode & 0o077]
    kept = [*run_dir.glob("keys/*"), run_dir / "gateway.secret"]
    secrets = [f.read_bytes().strip() for f in kept]
    assert len(secrets) >= 9
    for file in files:
        if file.is_file() and file not in kept:
            content = file.read_bytes()
            assert not [s for s in secrets if s in content], file
            assert b"canary-" not in content, file
