"""A small installation with a dashboard: log, inference double, gateway and store, and a history of two steps that real
calls made."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx

from pipeline.config import Config, GatewayConfig, ModelConfig, NatsConfig, StoreConfig, UiConfig, VllmConfig
from pipeline.events import GroupScored, Measure, TaskResult, Variant
from pipeline.log.broker import Broker
from tests.conftest import InferenceDouble, NatsServer, free_port
from tests.kits.sampler import SamplerThread
from tests.kits.services import service, serving
from tests.rollout_gateway.conftest import PROJECT, GatewayProcess, publish_adapter
from tests.store.kit import evaluated, publish, scored, verdict, what_if_answered

MODEL = "tictactoe"
GROUPS = ("board/1", "board 2")
MEMBERS = 3
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@dataclass(frozen=True)
class Living:
    """Where the installation is."""

    url: str
    """Of the dashboard."""
    gateway: GatewayProcess

    def until(self, path: str, holds: Any, seconds: float = 60) -> Any:
        """Read a page's JSON until `holds(data)`, and return it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            data = httpx.get(f"{self.url}/{path}", timeout=60).json()
            if holds(data):
                return data
            time.sleep(0.2)  # what the dashboard sees are files, which appear without a word
        raise AssertionError(f"{path}: {str(data)[:2000]}")


@contextlib.contextmanager
def living(folder: Path) -> Iterator[Living]:
    """An installation with its files in `folder`."""
    with contextlib.ExitStack() as stack:
        nats = stack.enter_context(serving(NatsServer(folder)))
        double = stack.enter_context(serving(InferenceDouble(folder)))
        ports = free_port(), free_port()
        config = Config(
            project=PROJECT,
            run_dir=str(folder / "runs" / "here"),
            nats=NatsConfig(url=nats.url),
            vllm=VllmConfig(urls=(double.url,), max_loras=3),
            models=(ModelConfig(name=MODEL, base=str(double.base)),),
            gateway=GatewayConfig(port=ports[0]),
            store=StoreConfig(flush_s=0.2),
            ui=UiConfig(port=ports[1], gateway_url=f"http://127.0.0.1:{ports[0]}"),
        )
        gateway = stack.enter_context(serving(GatewayProcess(config)))
        stack.enter_context(serving(SamplerThread(config)))
        for module in ("store", "store.showing.dashboard"):
            stack.enter_context(service(module, config))
        found = Living(f"http://127.0.0.1:{ports[1]}", gateway)
        anyio.run(_play, gateway, config.nats)
        found.until("checkpoints.json", lambda data: len(data["rows"]) == len(GROUPS))
        found.until("whatif.json", lambda data: data["rows"] and data["rows"][0]["variants"][0]["measures"])
        found.until("overview.json", lambda data: data["evaluations"] and data["counts"]["groups"] == len(GROUPS))
        found.until(f"checkpoint/{MODEL}@2.json", lambda data: any(row["replica"] for row in data["adapters"]))
        yield found


async def _play(gateway: GatewayProcess, nats: NatsConfig) -> None:
    """Play, judge and train two groups, one a step, and evaluate the last version."""
    branch, of = f"{MODEL}+stricter", {"project": PROJECT, "runs": 2}
    newest = Measure(name="reward", mean=0.75, low=0.5, high=1.0, count=2)
    changed = Measure(name="reward", mean=0.5, pairs=2, difference=-0.25, difference_low=-0.5, difference_high=0.0)
    tasks = TaskResult(task="corner", reward=0.5), TaskResult(task="middle", reward=1.0)
    variant = Variant(branch="stricter", version=f"{branch}@1", settings='{"judge.rubric":"stricter.md"}', groups=2)
    measured = [
        evaluated("newest", newest, model=MODEL, version=f"{MODEL}@2", tasks=tasks, **of),
        evaluated(f"{branch}@1", changed, evaluation="e2", position=1, model=branch, **of),
        what_if_answered(variant, project=PROJECT, model=MODEL, groups=2, baseline=f"{MODEL}@2", evaluation="e2"),
    ]
    async with Broker.connect(nats) as broker:
        for step, group in enumerate(GROUPS, 1):
            members = [await anyio.to_thread.run_sync(_trajectory, gateway, group, i) for i in range(MEMBERS)]
            await broker.publish(_scored(group, members))
            await publish_adapter(broker, step, groups=(group,))
        await publish(broker, measured)


def _trajectory(gateway: GatewayProcess, group: str, number: int) -> str:
    opened = gateway.open(id=f"{group.replace('/', '-')} run {number}", group=group, task="win", attempt=number)
    messages: list[Any] = [{"role": "system", "content": "Play."}, {"role": "user", "content": "a1=x b2=o"}]
    with gateway.agent(opened) as agent:
        for turn in range(2):
            answer = agent.chat.completions.create(
                model=MODEL,
                messages=messages,
                max_tokens=8,
                seed=10 * number + turn,
                tool_choice="none",
                tools=[_TOOL],  # type: ignore[list-item]
            )
            said = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"<b>c{turn}=o</b>"}]
    assert gateway.complete(opened["id"], reward=number / 2).status_code == 200
    return str(opened["id"])


def _scored(group: str, members: list[str]) -> GroupScored:
    rewards = {name: i / (len(members) - 1) for i, name in enumerate(members)}
    said = verdict(rewards, {name: "It wins." for name, reward in rewards.items() if reward > 0.5})
    return scored(group, rewards, {"exchanges": 2}, project=PROJECT, model=MODEL, task="win", verdicts=(said,))
