"""A run of two agents, each with rewards of its own: gateway, judge and trainer on one log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import numpy as np
import openai
import pytest

from journeywork import Journeywork, JourneyworkError
from pipeline.config import JudgeConfig, NatsConfig, RewardConfig
from pipeline.events import ExchangeRecorded
from pipeline.log.broker import Broker
from tests.conftest import VllmServer
from tests.judge.kit import groups, judging
from tests.kits.clients import closed_after_test
from tests.rollout_gateway.conftest import PROJECT, GatewayProcess, StartGateway
from tests.trainer import kit
from trainer.batches import graders
from trainer.batches.examples import Example, examples

pytestmark = [pytest.mark.anyio, pytest.mark.inference, pytest.mark.timeout(300)]

TURNS = ("planner", "worker", "planner", "worker", "worker")
REWARDS = {"team-0": (1.0, {"planner": 1.0, "worker": -0.5}), "team-1": (0.0, {"worker": 1.0})}
"""Of each run: the team's reward, and those of its agents, which are said of an agent's last call."""


def play(gateway: GatewayProcess) -> None:
    with Journeywork(gateway.url) as client:
        for name, (reward, of_roles) in REWARDS.items():
            with client.trajectory("tictactoe", id=name) as run:
                agents = {role: closed_after_test(openai.OpenAI(**run.role(role))) for role in set(TURNS)}
                for turn, role in enumerate(TURNS):
                    ask: Any = [{"role": "user", "content": f"a{turn + 1}=x"}]
                    agents[role].chat.completions.create(model="tictactoe", messages=ask, max_tokens=4)
                for role, value in of_roles.items():
                    run.feedback(role=role, value=value, name="reward")
                with pytest.raises(JourneyworkError, match="Its roles are: planner, worker"):
                    run.feedback(role="critic", value=1.0)
                with pytest.raises(openai.BadRequestError):
                    closed_after_test(openai.OpenAI(**run.role("%00"))).chat.completions.create(
                        model="tictactoe", messages=ask, max_tokens=4
                    )
                run.reward = reward


async def test_each_agent_of_a_run_learns_from_its_own_rewards_and_the_teams(
    start_gateway: StartGateway, nats_config: NatsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Example] = []

    def remember(*args: Any) -> list[Example]:
        made[:] = examples(*args)
        return made

    monkeypatch.setattr(graders, "examples", remember)
    gateway = start_gateway()
    config = kit.settings(
        str(VllmServer.base), tmp_path / "trainer", nats_config,
        **{"groups_per_step": 2, "loss.baseline": "batch", "loss.advantage_scaling": "none"},
    )  # fmt: skip
    models = (msgspec.structs.replace(config.models[0], name="tictactoe"),)
    judge = JudgeConfig(min_size=1, rewards=(RewardConfig(name="team"),))
    config = msgspec.structs.replace(config, project=PROJECT, models=models, judge=judge)
    async with Broker.connect(nats_config) as broker:
        async with judging(broker, config):
            await anyio.to_thread.run_sync(play, gateway)
            scored = await groups(broker, 2)
        calls = await broker.read(ExchangeRecorded, project=PROJECT, trajectory="team-0")
        assert [c.event.role for c in calls] == list(TURNS)
        async with kit.running(config):
            await kit.steps_reach(broker, 1)
    given = {m.trajectory: (m.reward, m.call_rewards) for g in scored for m in g.members}
    assert given == {"team-0": (1.0, {"2": 1.0, "4": -0.5}), "team-1": (0.0, {"4": 1.0})}
    # Without a discount each call of an agent has returned the same: the team's reward and the agent's own.
    worth = {n: {r: team + own.get(r, 0.0) for r in TURNS} for n, (team, own) in REWARDS.items()}
    mean = {role: np.mean([of_run[role] for of_run in worth.values()]) for role in TURNS}
    trained = set()
    for example in made:
        sequence, advantages = example.sequence, example.call_advantages
        assert sequence.calls is not None
        assert advantages is not None
        for call, advantage in zip(sequence.calls[sequence.loss_mask], advantages, strict=True):
            role = TURNS[call]
            assert advantage == pytest.approx(worth[sequence.trajectory][role] - mean[role], abs=1e-10)
            trained.add((sequence.trajectory, int(call)))
    assert trained == {(name, call) for name in REWARDS for call in range(len(TURNS))}
