"""Every command of `deploy/compose.yaml` starts as compose would start it, and together they answer an agent."""

import json
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from judge.rewards.sandbox import sandbox_fault
from tests.compose_box import Box

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
RUN = Path("/runs/default")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm of compose"),
    pytest.mark.timeout(590),
    pytest.mark.skipif(bool(sandbox_fault()), reason=sandbox_fault()),
]


def settings_for_this_machine() -> str:
    """`compose.toml` with what needs a GPU replaced. Everything else is as it stands there."""
    text = (DEPLOY / "compose.toml").read_text("utf-8")
    for gpu, cpu in (
        ('device = "cuda"', 'device = "cpu"\nmax_model_len = 256'),
        ('engine = "unsloth"', 'engine = "transformers"'),
        ('args = ["--gpu-memory-utilization", "0.45"]', "args = []"),
    ):
        assert text.count(gpu) == 1
        text = text.replace(gpu, cpu)
    return text


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    runs, models = tmp_path / "runs", tmp_path / "models"
    runs.mkdir()
    models.mkdir()
    shutil.copytree(ROOT / "examples" / "tictactoe" / "model", models / "base")
    (tmp_path / "compose.toml").write_text(settings_for_this_machine())
    mounts = {
        "/runs": (runs, True),
        "/etc/journeywork.toml": (tmp_path / "compose.toml", False),
        "/models/base": (models / "base", False),
    }
    env = {"OPENAI_API_KEY": "x", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://nats:1"}
    try:
        made = Box.of(DEPLOY / "compose.yaml", tmp_path, mounts, env)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"this machine makes no network namespaces: {error}")
    try:
        yield made
    finally:
        made.close()


def until(condition: Callable[[], bool], seconds: float, box: Box, name: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if box.running[name].poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"{name} does not start ({box.running[name].poll()}):\n{box.log(name)[-3000:]}")
        time.sleep(1)  # what runs there can't report here, and a try is a container of its own


def test_every_service_starts_and_a_call_is_answered(box: Box) -> None:
    needed = {name for service in box.services.values() for name in service.get("depends_on", ())}

    def await_start(name: str) -> None:
        service = box.services[name]
        if service["restart"] == "no":
            assert box.running[name].wait(timeout=200) == 0, box.log(name)
        elif "healthcheck" in service:
            until(lambda: box.healthy(name), 300, box, name)
        else:
            until(lambda: '"ready"' in box.log(name), 120, box, name)

    for name in box.order():
        box.start(name)
        if name in needed:
            await_start(name)
    for name in box.services.keys() - needed:
        await_start(name)

    # The key that `docker compose exec gateway cat …` shows opens the gateway; nothing else does.
    key = box.run_in("gateway", ["cat", str(RUN / "keys" / "operator.key")]).stdout
    assert re.fullmatch("jw-.{40,}", key)
    answers = []
    for given in ("none", key):
        body = {"model": "support", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        call = ["curl", "-s", "-w", "\n%{http_code}", "-H", f"Authorization: Bearer {given}"]
        call += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        said = box.run_in("gateway", [*call, "http://127.0.0.1:8700/v1/chat/completions"]).stdout
        text, _, status = said.rpartition("\n")
        answers.append((int(status), json.loads(text)))
    assert answers[0][0] == 401
    assert answers[1][0] == 200, answers[1]
    assert answers[1][1]["model"].startswith("support@0")

    # Nobody runs as root, with a capability, or with another's environment.
    told = box.run_in("judge", ["sh", "-c", "id -u; env; grep CapEff /proc/self/status"]).stdout
    assert told.startswith("10001\n")
    assert "OPENAI_API_KEY=x" in told
    assert told.strip().endswith("0" * 16)
    assert "OPENAI_API_KEY" not in box.run_in("store", ["env"]).stdout

    # The run directory and its keys are its owner's.
    runs, _ = box.mounts["/runs"]
    assert stat.S_IMODE((runs / "default").stat().st_mode) == 0o700
    for secret in (runs / "default" / "keys").iterdir():
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600, secret

    # Everything stops when it is told to, within the file's time.
    for name in reversed([n for n in box.order() if box.services[n]["restart"] != "no"]):
        code = box.stop(name)
        assert code in (0, 143) if name in ("nats", "vllm") else code == 0, (name, code, box.log(name)[-2000:])
