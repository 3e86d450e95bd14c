"""What a mask matches is recorded nowhere, and the agent gets it."""

from __future__ import annotations

from typing import Any

import anyio.to_thread
import httpx
import msgspec
import pytest

from pipeline.config import ConfigError, MaskConfig
from pipeline.events import ExchangeRecorded, SignalGiven, TrajectoryCompleted, TrajectoryOpened
from pipeline.log.broker import Broker
from rollout_gateway.capture.masking import Masks
from tests.conftest import NatsServer
from tests.rollout_gateway.conftest import PROJECT, GatewayProcess, StartGateway
from tests.rollout_gateway.kit import exchanges

MAIL = MaskConfig(name="mail", pattern=r"[\w.+-]+@[\w-]+\.[a-z]+")
SECRET = "jane.doe@example.com"
pytestmark = [pytest.mark.anyio, pytest.mark.inference]


def play(gateway: GatewayProcess, name: str, text: str, *, stream: bool = False) -> str:
    """Play a run of two calls whose texts hold `text`. Returns what the agent got."""
    opened = gateway.open(id=name, task=f"write to {text}", metadata={"who": {text: [text]}})
    said = ""
    with gateway.agent(opened) as agent:
        for turn in range(2):
            ask: Any = [{"role": "user", "content": f"a{turn + 1}=x {text}"}]
            if stream:
                chunks = agent.chat.completions.create(
                    model="tictactoe", messages=ask, max_tokens=4, stream=True
                )
                said += "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            else:
                reply = agent.chat.completions.create(model="tictactoe", messages=ask, max_tokens=4)
                said += reply.choices[0].message.content or ""
    about = f"{gateway.url}/v1/trajectories/{name}/feedback"
    for _ in range(2):  # the repetition is the same signal
        given = {"text": f"ask {text}", "key": "one"}
        assert httpx.post(about, json=given).status_code == 201
        assert gateway.complete(name, reward=1.0, metadata={"to": text}).status_code == 200
        assert gateway.open(id=f"{name}-again", metadata={"to": text})
    return said


@pytest.mark.parametrize("stream", [False, True])
async def test_a_masked_text_is_in_no_file_and_its_call_has_no_tokens(
    start_gateway: StartGateway, nats_server: NatsServer, broker: Broker, stream: bool
) -> None:
    gateway = await anyio.to_thread.run_sync(lambda: start_gateway(masks=(MAIL,)))
    await anyio.to_thread.run_sync(lambda: play(gateway, "masked", SECRET, stream=stream))
    await anyio.to_thread.run_sync(lambda: play(gateway, "plain", "nobody", stream=stream))
    for event in await exchanges(broker, "masked"):
        (message,) = msgspec.json.decode(event.request)["messages"]
        assert message["content"].endswith("x [mail]")
        assert (event.prompt_ids, event.sampled_ids, event.logprobs) == (b"", b"", b"")
        assert b"token_ids" not in bytes(event.response)
    for event in await exchanges(broker, "plain"):
        assert event.prompt_ids
        assert event.sampled_ids
    openings = {r.event.trajectory: r.event for r in await broker.read(TrajectoryOpened)}
    opened = openings["masked"]
    assert opened.task == "write to [mail]"
    assert msgspec.json.decode(opened.metadata) == {"who": {"[mail]": ["[mail]"]}}
    (completed,) = [r.event for r in await broker.read(TrajectoryCompleted) if r.event.trajectory == "masked"]
    assert msgspec.json.decode(completed.metadata) == {"to": "[mail]"}
    (signal,) = [r.event for r in await broker.read(SignalGiven) if r.event.trajectory == "masked"]
    assert signal.text == "ask [mail]"
    found = [
        file
        for file in nats_server.folder.rglob("*")
        if file.is_file() and SECRET.encode() in file.read_bytes()
    ]
    assert not found


def exchange(request: Any, response: Any) -> ExchangeRecorded:
    return ExchangeRecorded(
        project=PROJECT, trajectory="t", seq=0, model="m", policy_version="m@0", step=0,
        request=msgspec.json.encode(request), response=msgspec.json.encode(response),
        prompt_ids=b"1234", sampled_ids=b"1234", logprobs=b"1234", request_hash="h",
    )  # fmt: skip


def test_an_answer_that_is_split_into_tokens_is_masked_whole() -> None:
    tokens = {"content": [{"token": "jane.doe"}, {"token": "@example.com"}]}
    message = {
        "content": f"It is {SECRET}.",
        "tool_calls": [{"function": {"arguments": f'{{"to":"{SECRET}"}}'}}],
    }
    event = exchange({"n": 1}, {"choices": [{"message": message, "logprobs": tokens, "token_ids": [7]}]})
    masked = Masks([MAIL])(event)
    assert b"jane" not in bytes(masked.response)
    assert (masked.sampled_ids, masked.request_hash) == (b"", "")
    assert bytes(masked.request) == bytes(event.request)


def test_what_does_not_match_stays_byte_for_byte() -> None:
    event = exchange({"b": 1, "a": ["x  ", "ü"]}, {"choices": []})
    assert Masks([MAIL])(event) is event
    secret = exchange({"a": SECRET}, {})
    assert Masks()(secret) is secret
    broken = msgspec.structs.replace(event, response=b'{"choices": [')
    assert Masks([MAIL])(broken) is broken


def test_masks_are_applied_in_their_order_and_bad_patterns_are_named() -> None:
    masks = Masks([MaskConfig(name="a", pattern="sk-[a-z]+"), MaskConfig(name="b", pattern=r"\[a\]")])
    assert bytes(masks(exchange({"k": "sk-abc"}, {})).request) == b'{"k":"[b]"}'
    with pytest.raises(ConfigError, match="the pattern of 'x' can't be used"):
        Masks([MaskConfig(name="x", pattern="(unclosed")])


@pytest.mark.timeout(20)
def test_no_pattern_takes_more_than_linear_time() -> None:
    masks = Masks([MaskConfig(name="x", pattern="(a+)+$")])
    assert masks(exchange({"k": "a" * 200_000 + "!"}, {})).prompt_ids
