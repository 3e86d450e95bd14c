"""The whole installation, as a user starts it, with each of its processes killed in turn while agents work."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio.to_thread
import httpx
import openai
import pytest

from tests.conftest import VllmServer
from tests.kits.attacker import check_environments, check_files, check_stranger, environment
from tests.kits.installation import Up, started

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.xdist_group("vllm of an installation")]

KILLED = ("gateway", "sampler", "judge", "trainer", "store", "nats", "vllm")
GROUP = 4


SETTINGS = (
    "models.0.name=tictactoe",
    f"models.0.base={VllmServer.base}",
    f"judge.group_size={GROUP}",
    "trainer.groups_per_step=2",
    "trainer.optimizer.learning_rate=2e-3",  # the demo's model is small
    "trainer.start_timeout_s=150",
    "vllm.max_model_len=256",
    "judge.api_key_env=OPENAI_API_KEY",
)


async def until(run: Up, condition: Callable[[], bool]) -> None:
    await anyio.to_thread.run_sync(run.until, condition, 300)


def kill(run: Up, name: str) -> int:
    """kill -9; how often it had been restarted before."""
    service = run.state["services"][name]
    os.kill(service["pid"], signal.SIGKILL)
    return int(service["restarts"])


def check_doors(run: Up) -> None:
    """Nobody outside can use NATS or vLLM, and no process knows a secret that is not its own."""
    state = run.state
    check_environments(state, run.run_dir)
    check_stranger(state["urls"]["nats"])
    for path in ("/v1/models", "/v1/load_lora_adapter", "/invocations", "/metrics", "/tokenize"):
        reply = httpx.request("GET" if path.endswith("s") else "POST", state["urls"]["vllm"][0] + path, json={})
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
    run_dir = tmp_path / "run"
    flags = ("--run-dir", str(run_dir))
    with started(tmp_path, run_dir, *flags, settings=SETTINGS, env=environment(), seconds=180) as run:
        await anyio.to_thread.run_sync(check_doors, run)
        fleet = Fleet(run.url)
        async with fleet.client, anyio.create_task_group() as tg:
            for lane in range(2):
                tg.start_soon(fleet.work, lane)
            for name in KILLED:
                enough = len(fleet.finished) + 2 * GROUP
                await until(run, lambda n=enough: len(fleet.finished) >= n)
                before = kill(run, name)
                await until(
                    run, lambda n=name, b=before: run.state["ready"] and run.state["services"][n]["restarts"] > b
                )
            enough = len(fleet.finished) + 4 * GROUP
            await until(run, lambda: len(fleet.finished) >= enough)
            fleet.stopping = True
    assert run.process.returncode == 0
    left = [s["pid"] for s in run.state["services"].values() if Path(f"/proc/{s['pid']}").exists()]
    assert not left
    check_files(run_dir)

    counted = run.query(
        "SELECT count(*) AS n, count(DISTINCT trajectory) AS different FROM trajectories WHERE completed_at IS NOT NULL"
    )
    assert counted == [{"n": len(fleet.finished), "different": len(fleet.finished)}]
    calls = run.query("SELECT count(*) AS n, count(DISTINCT (trajectory, seq, choice)) AS different FROM exchanges")
    # A call repeated because its gateway died is answered from the log, not sampled again.
    assert calls == [{"n": 2 * len(fleet.finished), "different": 2 * len(fleet.finished)}]
    trained = run.query("SELECT unnest(groups) AS g, step FROM checkpoints")
    assert trained
    assert len({row["g"] for row in trained}) == len(trained), "a group trained twice"
    steps = sorted({row["step"] for row in trained})
    assert steps == list(range(1, len(steps) + 1)), "a step is missing"
