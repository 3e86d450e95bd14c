"""The whole installation, as a user starts it, with each of its processes killed in turn while agents work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest

from tests.kits.attacker import check_environments, check_files, check_stranger, environment

pytestmark = [
    pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(590), pytest.mark.xdist_group("vllm of an installation")
]  # fmt: skip

ROOT = Path(__file__).parent.parent
JOURNEYWORK = str(Path(sys.executable).with_name("journeywork"))
KILLED = ("gateway", "sampler", "judge", "trainer", "store", "nats", "vllm")
GROUP = 4


class Installation:
    """`journeywork up` in a process of its own."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        settings = {
            "models.0.name": "tictactoe",
            "models.0.base": str(ROOT / "examples" / "tictactoe" / "model"),
            "judge.group_size": GROUP,
            "trainer.groups_per_step": 2,
            "trainer.optimizer.learning_rate": 2e-3,  # the demo's model is small
            "trainer.start_timeout_s": 60,
            "vllm.max_model_len": 256,
            "ui.port": 0,
            "judge.api_key_env": "OPENAI_API_KEY",
        }
        flags = [f for k, v in settings.items() for f in ("--set", f"{k}={json.dumps(v)}")]
        self.process = subprocess.Popen(
            [JOURNEYWORK, "up", "--run-dir", str(run_dir), *flags], cwd=ROOT, stdout=subprocess.DEVNULL,
            env=environment(),
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        path = self.run_dir / "state.json"
        return json.loads(path.read_text()) if path.exists() else {"ready": False, "services": {}}

    async def until(self, condition: Any, what: str) -> None:
        with anyio.move_on_after(180):
            while self.process.poll() is None:
                if condition(self.state()):
                    return
                await anyio.sleep(0.1)
        logs = {p.name: p.read_text()[-1500:] for p in (self.run_dir / "logs").glob("*.log")}
        raise AssertionError(
            f"{what}; state {self.state()}; logs " + "\n".join(f"== {k}\n{v}" for k, v in logs.items())
        )

    def kill(self, name: str) -> int:
        """kill -9; how often it had been restarted before."""
        service = self.state()["services"][name]
        os.kill(service["pid"], signal.SIGKILL)
        return int(service["restarts"])

    def sql(self, query: str) -> list[dict[str, Any]]:
        out = subprocess.run(
            [JOURNEYWORK, "sql", "--run-dir", str(self.run_dir), "--format", "json", query],
            check=True, capture_output=True, text=True, cwd=ROOT,
        )  # fmt: skip
        rows: list[dict[str, Any]] = json.loads(out.stdout)
        return rows


def check_doors(installation: Installation) -> None:
    """Nobody outside can use NATS or vLLM, and no process knows a secret that is not its own."""
    state = installation.state()
    check_environments(state, installation.run_dir)
    check_stranger(state["urls"]["nats"])
    for path in ("/v1/models", "/v1/load_lora_adapter", "/invocations", "/metrics", "/tokenize"):
        reply = httpx.request(
            "GET" if path.endswith("s") else "POST", state["urls"]["vllm"][0] + path, json={}
        )
        assert reply.status_code == 401, path


class Fleet:
    """Agents that know nothing but the `openai` package; each run is two turns."""

    def __init__(self, url: str) -> None:
        # A new group is refused (429) while others wait for training: here for as long as a killed trainer takes to
        # come back. `Retry-After` is a second, so the client repeats for more than three minutes.
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=200, timeout=240)
        self.finished: list[str] = []
        self.stopping = False

    async def group(self, index: int) -> None:
        async with anyio.create_task_group() as tg:
            for attempt in range(GROUP):
                tg.start_soon(self.run, f"g{index}", attempt)

    async def run(self, group: str, attempt: int) -> None:
        body = {"model": "tictactoe", "group": group, "attempt": attempt, "id": f"{group}-{attempt}"}
        run: Any = await self.client.post("/trajectories", cast_to=object, body=body)
        agent = self.client.with_options(base_url=run["base_url"], api_key=run["api_key"])
        messages: list[Any] = [{"role": "user", "content": "."}]
        said = []
        for _ in range(2):
            reply = await agent.chat.completions.create(model="tictactoe", messages=messages, max_tokens=4)
            text = reply.choices[0].message.content or ""
            said.append(text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "."}]
        reward = (attempt % 2) * 1.0
        await self.client.post(f"/trajectories/{run['id']}/complete", cast_to=object, body={"reward": reward})
        self.finished.append(run["id"])

    async def work(self, lane: int) -> None:
        index = 0
        while not self.stopping:
            await self.group(lane * 100_000 + index)
            index += 1


async def test_every_process_is_killed_once_and_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    installation = Installation(tmp_path / "run")
    try:
        await installation.until(lambda s: s["ready"], "did not come up")
        await anyio.to_thread.run_sync(check_doors, installation)
        fleet = Fleet(installation.state()["urls"]["gateway"])
        async with fleet.client, anyio.create_task_group() as tg:
            for lane in range(2):
                tg.start_soon(fleet.work, lane)
            for name in KILLED:
                enough = len(fleet.finished) + 2 * GROUP
                await installation.until(
                    lambda _, n=enough: len(fleet.finished) >= n, f"no progress before {name}"
                )
                before = installation.kill(name)
                await installation.until(
                    lambda s, n=name, b=before: s["ready"] and s["services"][n]["restarts"] > b,
                    f"{name} did not come back",
                )
            enough = len(fleet.finished) + 4 * GROUP
            await installation.until(
                lambda _: len(fleet.finished) >= enough, "no progress after the last kill"
            )
            fleet.stopping = True
        installation.process.send_signal(signal.SIGINT)
        with anyio.fail_after(120):
            code = await anyio.to_thread.run_sync(installation.process.wait)
        assert code == 0
    finally:
        if installation.process.poll() is None:
            installation.process.kill()
            installation.process.wait()
    left = [s["pid"] for s in installation.state()["services"].values() if Path(f"/proc/{s['pid']}").exists()]
    assert not left
    check_files(installation.run_dir)

    counted = installation.sql(
        "SELECT count(*) AS n, count(DISTINCT trajectory) AS different FROM trajectories WHERE completed_at IS NOT NULL"
    )
    assert counted == [{"n": len(fleet.finished), "different": len(fleet.finished)}]
    calls = installation.sql(
        "SELECT count(*) AS n, count(DISTINCT (trajectory, seq, choice)) AS different FROM exchanges"
    )
    # A call repeated because its gateway died is answered from the log, not sampled again.
    assert calls == [{"n": 2 * len(fleet.finished), "different": 2 * len(fleet.finished)}]
    trained = installation.sql("SELECT unnest(groups) AS g, step FROM checkpoints")
    assert trained
    assert len({row["g"] for row in trained}) == len(trained), "a group trained twice"
    steps = sorted({row["step"] for row in trained})
    assert steps == list(range(1, len(steps) + 1)), "a step is missing"
