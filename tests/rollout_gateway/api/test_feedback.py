"""Feedback becomes signals: about any answer, at any time, and each once."""

import json
import re
from typing import Any

import anthropic
import httpx
import openai
import pytest

from judge.feedback import RunFeedback, counted_signals, feedback_on
from pipeline.config import Config, FeedbackConfig, JudgeConfig, ModelConfig, NatsConfig, RewardConfig, TrainerConfig
from pipeline.events import GroupDiscarded, GroupScored, Member, SignalGiven, TrajectoryOpened
from pipeline.log.broker import Broker
from rollout_gateway.api.feedback import _use_of
from rollout_gateway.capture.answer_ids import new_answer_id, trajectory_of, without_prefix
from tests.judge.kit import completed
from tests.kits.clients import closed_after_test
from tests.kits.settings import with_values
from tests.rollout_gateway.conftest import PROJECT, GatewayProcess, StartGateway
from tests.rollout_gateway.kit import ASK, error


def give(gateway: GatewayProcess, run: str = "", **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/{f'trajectories/{run}/' if run else ''}feedback", json=body, timeout=60)


async def signals(nats: NatsConfig) -> list[SignalGiven]:
    async with Broker.connect(nats) as broker:
        return [recorded.event for recorded in await broker.read(SignalGiven, project=PROJECT)]


# -- answers ----------------------------------------------------------------------------------------------------------


def test_an_answers_names_hold_its_run() -> None:
    for run in ("t-20261122T093012Z-5f1c", "a.b/c d", "chatcmpl-x.0123456789abcdef", "é%41"):
        name = new_answer_id(run)
        for prefix in ("chatcmpl-", "cmpl-", "resp_i-chatcmpl-", "resp_n-chatcmpl-", "fc_12-chatcmpl-", "msg_"):
            assert (trajectory_of(prefix + name), without_prefix(prefix + name)) == (run, name)
    for foreign in ("chatcmpl-5f", "msg_", "t-1", "chatcmpl-%GG.0123456789abcdef", "chatcmpl-%FF.0123456789abcdef"):
        assert trajectory_of(foreign) in (None, "%GG")


def answers(client: openai.OpenAI, anthropic_client: anthropic.Anthropic) -> dict[str, str]:
    """The id of the answer to one call by each API, plain and streamed."""
    ask: Any = {"model": "tictactoe", "input": "a1=x", "max_output_tokens": 4}
    message: Any = {"model": "tictactoe", "messages": ASK["messages"], "max_tokens": 4}
    ids = {
        "chat": client.chat.completions.create(**ASK).id,
        "chat, streamed": [chunk.id for chunk in client.chat.completions.create(**ASK, stream=True)][-1],
        "completion": client.completions.create(model="tictactoe", prompt="a1=x", max_tokens=4).id,
        "response": client.responses.create(**ask).id,
        "message": anthropic_client.messages.create(**message).id,
    }
    with client.responses.stream(**ask) as events:
        ids["response, streamed"] = next(event.response.id for event in events if event.type == "response.created")
    with anthropic_client.messages.stream(**message) as stream:
        ids["message, streamed"] = stream.get_final_message().id
    return ids


@pytest.mark.inference
@pytest.mark.parametrize("named_by", ["key", "headers"])
async def test_feedback_on_the_answers_of_each_api(
    gateway: GatewayProcess, nats_config: NatsConfig, named_by: str
) -> None:
    options: dict[str, Any] = {"base_url": f"{gateway.url}/v1", "api_key": "none"}
    if named_by == "key":
        opened = gateway.open(id="run/1", group="g")
        options["api_key"] = opened["api_key"]
    else:
        options["default_headers"] = {"x-journeywork-trajectory": "run%2F1", "x-journeywork-group": "g"}
    client = closed_after_test(openai.OpenAI(**options))
    claude = closed_after_test(anthropic.Anthropic(**{**options, "base_url": gateway.url}))
    for number, (api, name) in enumerate(answers(client, claude).items()):
        reply = give(gateway, answer=name, thumb="up", text=api)
        assert reply.json()["signals"] == [
            {"trajectory": "run/1", "call": number, "run": "open", "use": "history", "repeated": False}
        ], (api, name, reply.text)
        assert give(gateway, answer=name, about="run", value=1).json()["signals"][0]["call"] == -1
        wrong = f"{name[:-16]}{'0' * 16}"
        assert error(give(gateway, answer=wrong, about="run", value=1)) == (404, "exchange_not_found")
    given = [s.call for s in await signals(nats_config)]
    assert given == [call for number in range(7) for call in (number, -1)]


@pytest.mark.inference
async def test_feedback_on_a_run_that_names_itself_nowhere(
    start_gateway: StartGateway, broker: Broker, nats_config: NatsConfig
) -> None:
    gateway = start_gateway(**{"detection.enabled": True})
    answer = gateway.client().chat.completions.create(**ASK).id
    assert give(gateway, answer=answer, value=0.5).status_code == 201
    (signal,) = await signals(nats_config)
    (opened,) = [r.event for r in await broker.read(TrajectoryOpened, project=PROJECT)]
    assert (signal.trajectory, signal.group, signal.call) == (opened.trajectory, opened.group, 0)


@pytest.mark.inference
@pytest.mark.parametrize("stream", [False, True])
async def test_a_retried_call_is_answered_from_the_log_with_its_id(
    gateway: GatewayProcess, nats_config: NatsConfig, stream: bool
) -> None:
    """Also by a gateway that was killed before the client had its answer; without the mark of a retry it is another
    call."""
    opened = gateway.open(id="r")

    def ask(**headers: str) -> tuple[str, str]:
        reply = httpx.post(
            f"{opened['base_url']}/chat/completions",
            json={**ASK, "stream": stream},
            timeout=60,
            headers={"authorization": f"Bearer {opened['api_key']}", **headers},
        )
        (name,) = set(re.findall(r'"id": ?"(chatcmpl[^"]*)"', reply.text))
        text = re.findall(r'"content": ?"((?:[^"\\]|\\.)*)"', reply.text)
        return str(name), "".join(json.loads(f'"{piece}"') for piece in text)

    first = ask()
    gateway.restart()
    assert ask(**{"x-stainless-retry-count": "1"}) == first
    assert ask()[0] != first[0]
    for number, (name, _) in enumerate((first, ask(**{"x-stainless-retry-count": "1"}))):
        assert give(gateway, answer=name, thumb="up", key=str(number)).status_code == 201
    assert [s.call for s in await signals(nats_config)] == [0, 1]


# -- bodies -----------------------------------------------------------------------------------------------------------


async def test_what_a_body_says(start_front: StartGateway, nats_config: NatsConfig) -> None:
    gateway = start_front(max_reward=5)
    for name in ("r", "s", "t"):
        gateway.open(id=name, group="g" if name == "r" else "", split="val")
    said: list[tuple[dict[str, Any], tuple[str, float | None, str]]] = [
        ({"value": -5}, ("number", -5.0, "")),
        ({"value": 4, "scale": [1, 5], "text": "good"}, ("number", 0.75, "good")),
        ({"thumb": "up"}, ("number", 1.0, "")),
        ({"thumb": "down", "text": "no"}, ("number", -1.0, "no")),
        ({"correction": "b2"}, ("correction", None, "b2")),
        ({"text": "the other account"}, ("text", None, "the other account")),
    ]
    for body, _ in said:
        assert give(gateway, "r", name="n", source="test", **body).status_code == 201
    for source in ("healing", "outside:master"):  # what these say may not be learned from as a person's words
        # Before the run is read for its calls: there is no call 9.
        assert error(give(gateway, "r", correction="b2", source=source, call=9)) == (400, "invalid_body")
    assert give(gateway, ranking=["s", "r", "t"], text="why").status_code == 201
    given = await signals(nats_config)
    assert [(s.kind, s.value, s.text) for s in given] == [
        *(signal for _, signal in said),
        *(("number", value, "why") for value in (1.0, 0.5, 0.0)),
    ]
    assert [s.trajectory for s in given[-3:]] == ["s", "r", "t"]
    assert {s.group for s in given} == {"g", "s", "t"}
    assert {(s.model, s.split, s.call, s.by) for s in given} == {("tictactoe", "val", -1, "")}
    assert {(s.name, s.source) for s in given} == {("n", "test"), ("feedback", "api")}
    refused: list[dict[str, Any]] = [
        {},
        {"value": 1, "thumb": "up"},
        {"correction": "x", "text": "y"},
        {"value": 5.1},
        {"value": "1"},
        {"scale": [0, 1]},
        {"value": 1, "scale": [1, 1]},
        {"value": 3, "scale": [0, 2]},
        {"values": 1},
        {"thumb": "sideways"},
        {"text": "x" * 65537},
        {"thumb": "up", "name": ""},
        {"thumb": "up", "key": "x" * 201},
        {"thumb": "up", "call": -2},
        {"thumb": "up", "answer": "r"},
        {"ranking": ["r", "s"]},
    ]
    for body in refused:
        assert give(gateway, "r", **body).status_code == 400, body
    for body in (
        {"thumb": "up"},
        {"ranking": ["r"]},
        {"ranking": ["r", "r"]},
        {"ranking": ["r", "s"], "value": 1},
        {"answer": "chatcmpl-1", "ranking": ["r", "s"]},
    ):
        assert give(gateway, **body).status_code == 400, body
    wrong = give(gateway, trajectory="r", thumb="up")
    assert (error(wrong), wrong.json()["error"]["param"]) == ((400, "invalid_body"), "trajectory")
    assert "POST /v1/trajectories/<id>/feedback" in wrong.json()["error"]["message"]
    assert len(await signals(nats_config)) == len(given)


async def test_the_state_of_the_run_is_told(start_front: StartGateway, broker: Broker, nats_config: NatsConfig) -> None:
    gateway = start_front()
    for name in ("open", "done", "lost", "won"):
        gateway.open(id=name)
    for name in ("done", "lost", "won"):
        gateway.complete(name, reward=0)
    await broker.publish(
        GroupDiscarded(
            project=PROJECT, group="lost", model="tictactoe", trajectories=("lost",), reason="late", by="judge"
        )
    )
    members = (Member(trajectory="won", reward=1.0),)
    await broker.publish(GroupScored(project=PROJECT, group="won", model="tictactoe", judge="j", members=members))
    old = "t-20200101T000000Z-" + "0" * 20
    about: list[tuple[dict[str, Any], Any]] = [
        ({"run": "open"}, {"run": "open"}),
        ({"run": "done"}, {"run": "completed"}),
        ({"run": "lost"}, {"run": "discarded", "reason": "late", "use": "history"}),
        ({"run": "won"}, {"run": "scored", "use": "history"}),
        ({"run": "nobody"}, (404, "trajectory_not_found")),
        ({"run": old}, (410, "trajectory_expired")),
        ({"answer": f"chatcmpl-{new_answer_id(old)}"}, (410, "trajectory_expired")),
        ({"answer": f"chatcmpl-{new_answer_id('nobody')}"}, (404, "trajectory_not_found")),
        ({"answer": f"chatcmpl-{new_answer_id('open')}"}, (404, "exchange_not_found")),
        ({"answer": "chatcmpl-5f1c"}, (404, "exchange_not_found")),
        ({"run": "open", "call": 0}, (404, "exchange_not_found")),
        ({"run": "done", "call": "chatcmpl-5f1c"}, (404, "exchange_not_found")),
        ({"ranking": ["open", "nobody"]}, (404, "trajectory_not_found")),
    ]
    for body, told in about:
        grade = {} if "ranking" in body else {"thumb": "down"}
        reply = give(gateway, **body, **grade)
        if isinstance(told, dict):
            (signal,) = reply.json()["signals"]
            assert {name: signal.get(name) for name in told} == told
        else:
            assert error(reply) == told, body
    assert [s.trajectory for s in await signals(nats_config)] == ["open", "done", "lost", "won"]


# -- use --------------------------------------------------------------------------------------------------------------

DONE, SCORED = {"run": "completed"}, {"run": "scored"}
UNSCORED, TOO_LATE = ({"run": "discarded", "reason": reason} for reason in ("unscored", "late"))


@pytest.mark.parametrize(
    ("said", "state", "late", "use"),
    [
        ({}, DONE, "train", "reward"),
        ({"call": 1}, DONE, "train", "call_reward"),
        ({"name": "resullt"}, DONE, "train", "history"),
        ({"by": "mole"}, DONE, "train", "history"),
        ({"name": "reward", "call": 1, "by": "agent"}, DONE, "train", "call_reward"),
        ({"name": "reward", "call": 1}, DONE, "train", "history"),
        ({"kind": "text", "text": "no"}, DONE, "train", "hint"),
        ({"kind": "correction", "text": "b2", "model": "untaught"}, DONE, "train", "history"),
        ({"kind": "text", "text": "no", "model": "outside"}, DONE, "train", "history"),
        ({}, SCORED, "train", "history"),
        ({}, UNSCORED, "train", "reward"),
        ({}, UNSCORED, "record", "history"),
        ({}, TOO_LATE, "train", "history"),
    ],
)
def test_what_the_settings_make_of_a_signal_is_told(
    said: dict[str, Any], state: dict[str, str], late: Any, use: str
) -> None:
    reward = RewardConfig(name="result", kind="feedback", by=("desk",))
    settings = {"m": {}, "untaught": {"weight": 0.0}, "outside": {"teacher": "outside"}}
    config = Config(
        models=tuple(ModelConfig(name=n, base="b", trainer={"distill": s}) for n, s in settings.items()),
        judge=JudgeConfig(rewards=(reward,)),
        trainer=with_values(TrainerConfig(), {"distill.weight": 1.0}),
        feedback=FeedbackConfig(late=late),
    )
    about = {"project": "p", "signal": "s", "trajectory": "t", "model": "m", "group": "t", "by": "desk"}
    signal = SignalGiven(**({"name": "result", "value": 1.0} | about | said))
    assert _use_of(config, signal, "agent", state) == use


@pytest.mark.parametrize(("by", "use"), [("alice", "call_reward"), ("bob", "history"), ("carol", "history")])
def test_a_reward_of_kind_feedback_that_is_called_reward_replaces_the_owner_s(by: str, use: str) -> None:
    """The judge drops the numbers of other keys, the owner's included."""
    rewards = (RewardConfig(name="reward", kind="feedback", by=("alice",)),)
    config = Config(judge=JudgeConfig(rewards=rewards))
    signal = SignalGiven(
        project="p", signal="s", trajectory="t", model="m", group="t", name="reward", value=1.0, call=1, by=by
    )
    assert _use_of(config, signal, "bob", {"run": "completed"}) == use
    run = completed("t", owner="bob")
    said = feedback_on([run], counted_signals([signal], config.judge), config.judge, {})
    assert bool(said.get("t", RunFeedback()).call_rewards) == (use == "call_reward")
