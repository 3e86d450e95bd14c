"""What a reward function can't do: reach the network, write files, read what is not its own, leave processes behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import anyio
import psutil
import pytest

from judge import confine
from judge.sandbox import RewardFunction, RewardFunctionError
from pipeline.config import RewardConfig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


def kernel_lacks() -> list[str]:
    """What this machine's kernel does not permit, tried in a process of its own."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from confine import confine; print(*confine(), sep='\\n')"
    folder = str(Path(confine.__file__).parent)
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:-1]


LACKS = [line for line in kernel_lacks() if line]
needs_kernel = pytest.mark.skipif(bool(LACKS), reason=f"the kernel does not permit it: {LACKS}")


def function(name: str, isolate: str = "require") -> RewardFunction:
    config = {"name": name, "kind": "python", "entry": f"tests.judge.functions:{name}", "isolate": isolate}
    return RewardFunction(RewardConfig(**config))  # type: ignore[arg-type]


@needs_kernel
async def test_a_function_reaches_no_network_and_no_file(tmp_path: Path) -> None:
    secret, target = tmp_path / "secret", tmp_path / "target"
    secret.write_text("key")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for name, task in [("connects", port), ("writes", str(target)), ("reads", str(secret))]:
            async with function(name).open() as call:
                with pytest.raises(RewardFunctionError, match="Error"):
                    await call({"id": "a", "task": task})
            async with function(name, "off").open() as call:  # and that is the confinement's doing
                assert await call({"id": "a", "task": task}) > 0
    target.unlink()
    async with function("writes").open() as call:
        with pytest.raises(RewardFunctionError, match="Error"):
            await call({"id": "a", "task": str(target)})
    assert not target.exists()
    async with function("length").open() as call:  # what only computes notices nothing
        assert await call({"id": "a", "messages": [1, 2, 3]}) == 0.3


async def test_what_a_function_began_ends_with_it() -> None:
    config = RewardConfig(
        name="x", kind="python", entry="tests.judge.functions:leaves_a_child", timeout_s=2.0
    )
    async with RewardFunction(config).open() as call:
        assert await call({"id": "good"}) == 0.5
        assert call._process is not None
        group = call._process.pid
        with pytest.raises(RewardFunctionError, match="took longer"):
            await call({"id": "bad"})
        with anyio.fail_after(10):
            while any(
                os.getpgid(p.pid) == group for p in psutil.process_iter() if p.is_running() and _alive(p)
            ):
                await anyio.sleep(0.05)


def _alive(process: psutil.Process) -> bool:
    try:
        os.getpgid(process.pid)
        return process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


async def test_a_kernel_that_permits_nothing_is_a_warning_or_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose `confine` finds nothing permitted stands in for such a kernel."""
    worker = Path(confine.__file__).with_name("sandbox_worker.py").read_text()
    (tmp_path / "sandbox_worker.py").write_text(worker)
    (tmp_path / "confine.py").write_text("def confine():\n    return ['network namespace: no']\n")
    monkeypatch.setattr("judge.sandbox._WORKER", str(tmp_path / "sandbox_worker.py"))
    warned: list[dict[str, object]] = []
    monkeypatch.setattr("judge.sandbox.log.warning", lambda _, **fields: warned.append(fields))
    async with function("length", "auto").open() as call:
        assert await call({"id": "a", "messages": []}) == 0.0
    assert [w["missing"] for w in warned] == [("network namespace: no",)]
    async with function("length").open() as call:
        with pytest.raises(RewardFunctionError, match="can't be confined: network namespace: no"):
            await call({"id": "a", "messages": []})
