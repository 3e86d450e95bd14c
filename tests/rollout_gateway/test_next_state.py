"""A chat client that reports nothing learns from what its users say next: gateway, judge and trainer on one log."""

from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import numpy as np
import pytest
from anthropic import Anthropic

from pipeline.config import JudgeConfig, NatsConfig, RewardConfig
from pipeline.events import GroupScored
from pipeline.log.broker import Broker
from tests.conftest import VllmServer
from tests.judge.kit import IMPORTS_LITELLM, groups, judging
from tests.kits.clients import closed_after_test
from tests.kits.scoring_server import ScoringServer
from tests.rollout_gateway.conftest import PROJECT, GatewayProcess, StartGateway
from tests.trainer import kit
from trainer.batches import graders
from trainer.batches.examples import Example, make_examples

pytestmark = [pytest.mark.inference, pytest.mark.timeout(300), IMPORTS_LITELLM]

CHATS = {
    ("a1=x", "thanks", "no, you should have played b2 there", "thanks"): (1.0, -1.0, 1.0, 0.0),
    ("b2=o", "no, wrong", "thanks", "a2=x"): (-1.0, 1.0, 0.0, 0.0),
    ("c3=x", "thanks", "no, wrong", "no, wrong"): (1.0, -1.0, -1.0, 0.0),
}
"""What the user of each chat says, and what each of its calls is worth by what the user says next."""
DISCOUNT = 0.5


def talk(gateway: GatewayProcess, said: tuple[str, ...], api: str) -> None:
    """A chat by one of three APIs: the whole conversation with each call, and no word about runs or rewards."""
    messages = list[Any]()
    more: Any = {"model": "tictactoe", "extra_body": {"ignore_eos": True}}  # no answer is empty
    ask: Any = {**more, "messages": messages, "max_tokens": 4}
    openai, claude = gateway.client(), closed_after_test(Anthropic(base_url=gateway.url, api_key="none"))
    for text in said:
        messages.append({"role": "user", "content": text})
        match api:
            case "chat":
                reply: Any = openai.chat.completions.create(**ask).choices[0].message.content
            case "responses":
                reply = openai.responses.create(**more, input=messages, max_output_tokens=4).output_text
            case "messages":
                reply = claude.messages.create(**ask).content
        messages.append({"role": "assistant", "content": reply or ""})


def returns(rewards: tuple[float, ...]) -> list[float]:
    """The return of each call by its formula; the run's own reward is 0."""
    last = range(len(rewards))
    return [sum(DISCOUNT ** (j - k) * rewards[j] for j in last if j >= k) for k in last]


async def test_a_chat_client_that_reports_nothing_is_trained_by_what_its_users_say_next(
    start_gateway: StartGateway, nats_config: NatsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Example] = []

    def remember(*args: Any) -> list[Example]:
        made[:] = make_examples(*args)
        return made

    monkeypatch.setattr(graders, "make_examples", remember)
    detection = {"detection.enabled": True, "detection.grouped": False, "detection.idle_s": 600.0}
    gateway = start_gateway(**detection)
    config = kit.settings(
        str(VllmServer.base),
        tmp_path / "trainer",
        nats_config,
        **{
            "groups_per_step": len(CHATS),
            "loss.baseline": "batch",
            "loss.advantage_scaling": "none",
            "loss.turn_discount": DISCOUNT,
        },
    )
    models = (msgspec.structs.replace(config.models[0], name="tictactoe"),)
    async with ScoringServer().run() as model, Broker.connect(nats_config) as broker:
        rewards = (RewardConfig(name="next", kind="next_state"),)
        judge = JudgeConfig(min_size=1, model="openai/scorer", api_base=model.url, rewards=rewards)
        config = msgspec.structs.replace(config, project=PROJECT, models=models, judge=judge)
        async with judging(broker, config):
            for said, api in zip(CHATS, ("chat", "responses", "messages"), strict=True):
                await anyio.to_thread.run_sync(talk, gateway, said, api)
            # No pause of a chat ends it, and when all have been said each is soon silent for long enough.
            await anyio.to_thread.run_sync(lambda: gateway.restart(**{"detection.idle_s": 0.1}))
            scored: list[GroupScored] = await groups(broker, len(CHATS))
        async with kit.running(config):
            (step,) = await kit.steps_reach(broker, 1)
    worth = {g.members[0].trajectory: g.members[0] for g in scored}
    given = {tuple(m.call_rewards.get(str(k), 0.0) for k in range(4)): m for m in worth.values()}
    assert set(given) == set(CHATS.values())
    assert {m.reward for m in worth.values()} == {0.0}
    assert [h.text for m in worth.values() for h in m.hints] == ["played b2 there"]
    assert set(step.groups) == {g.group for g in scored}
    assert step.metrics["grad_norm"] > 0
    means = np.mean([returns(calls) for calls in CHATS.values()], axis=0)
    advantages = {m.trajectory: np.array(returns(calls)) - means for calls, m in given.items()}
    trained = set[tuple[str, int]]()
    for example in made:
        sequence = example.sequence
        assert sequence.calls is not None
        assert example.call_advantages is not None
        calls = sequence.calls[sequence.loss_mask]
        expected = advantages[sequence.trajectory][calls]
        np.testing.assert_allclose(example.call_advantages, expected, rtol=0, atol=1e-10)
        trained |= {(sequence.trajectory, int(call)) for call in calls}
    judged = {t: max(int(call) for call in (*m.call_rewards, *(h.call for h in m.hints))) for t, m in worth.items()}
    assert trained == {(trajectory, call) for trajectory, last in judged.items() for call in range(last + 1)}
    assert step.metrics["tokens_unjudged"] > 0
