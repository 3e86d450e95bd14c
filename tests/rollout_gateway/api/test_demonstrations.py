"""Conversations that the model did not have, recorded as calls in the tokens of its chat template."""

from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from pipeline.events import ExchangeRecorded, unpack_ids
from pipeline.log.broker import Broker
from tests.rollout_gateway.conftest import GatewayProcess
from trainer.sequences import build

pytestmark = pytest.mark.inference

CHAT = [
    {"role": "user", "content": "0"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "7"},
]


async def test_each_reply_is_a_call_with_the_prompt_that_the_model_would_have_got(
    gateway: GatewayProcess, broker: Broker
) -> None:
    batch = {"id": "b", "groups": ["g"], "settings": {"loss.type": "sft", "optimizer.update_rates": [1e-3]}}

    def send(name: str = "demo", **demonstration: Any) -> httpx.Response:
        member = {"id": name, "reward": 1.0, "batch": batch, "demonstration": demonstration}
        body = {"model": "tictactoe", "trajectories": [member]}
        return httpx.post(f"{gateway.url}/v1/groups/g/complete", json=body)

    for _ in range(2):  # a retry records nothing more
        (done,) = send(messages=CHAT).json()["data"]
        assert (done["exchanges"], done["reward"]) == (2, 1.0)
    unreadable = [*CHAT[:2], {"role": 7, "content": "1"}, *CHAT[3:]]
    for refused in (
        {"messages": CHAT[:1]},
        {"messages": CHAT[1:2]},
        {"messages": CHAT, "model": "x"},
        {"messages": []},
        {"messages": unreadable},
    ):
        assert send("other", **refused).status_code == 400
        assert httpx.get(f"{gateway.url}/v1/trajectories/other").status_code == 404  # it was not opened
    events = [r.event for r in await broker.read(ExchangeRecorded, trajectory="demo")]
    tokenizer: Any = AutoTokenizer.from_pretrained("examples/tictactoe/model")
    for event, at in zip(events, (1, 3), strict=True):
        assert list(unpack_ids(event.prompt_ids)) == tokenizer.apply_chat_template(
            CHAT[:at], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert tokenizer.decode(unpack_ids(event.sampled_ids)).startswith(CHAT[at]["content"])
        assert (event.logprobs, event.endpoint, event.status) == (b"", "demonstration", "complete")
    sequences = build("demo", events)
    assert sum(s.trained_tokens for s in sequences) == sum(len(unpack_ids(e.sampled_ids)) for e in events)


async def test_a_demonstration_that_was_cut_short_is_continued_where_it_ended(
    gateway: GatewayProcess, broker: Broker
) -> None:
    """Also a long one, whose first calls the gateway no longer remembers."""
    chat = [{"role": role, "content": str(turn % 9)} for turn in range(12) for role in ("user", "assistant")]
    member = {"id": "long", "reward": 1.0, "demonstration": {"messages": chat}}
    body = {"model": "tictactoe", "trajectories": [member]}
    gateway.restart(crash_at="broker.before_publish:12")
    with pytest.raises(httpx.TransportError):
        httpx.post(f"{gateway.url}/v1/groups/g/complete", json=body)
    gateway.start()
    (done,) = httpx.post(f"{gateway.url}/v1/groups/g/complete", json=body).json()["data"]
    assert done["exchanges"] == 12
    recorded = [r.event.request_hash for r in await broker.read(ExchangeRecorded, trajectory="long")]
    assert len(recorded) == len(set(recorded)) == 12
