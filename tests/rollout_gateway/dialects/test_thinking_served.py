"""A thinking model's own turns through the gateway: prompts on the log are those that a chat completion with
`reasoning_content` gets, token for token."""

from typing import Any

import openai
import pytest

from pipeline.log.broker import Broker
from tests.rollout_gateway.access.test_access import Caller
from tests.rollout_gateway.conftest import StartGateway
from tests.rollout_gateway.kit import exchanges, key_config

pytestmark = pytest.mark.inference


async def test_answers_are_referred_to_by_id(start_gateway: StartGateway, broker: Broker) -> None:
    """As clients do that leave the conversation with the server: by `previous_response_id`, or by `item_reference`. A
    trajectory's key knows its own answers, an agent's key those of its runs."""
    gateway = start_gateway(keys=(key_config("alice"), key_config("bob")))
    alice = Caller(gateway, "alice")
    client = gateway.agent(alice.open(id="kept"), max_retries=0)
    # A model of random numbers now and then ends its answer at once, and an answer without a text has no item.
    says_something = {"extra_body": {"ignore_eos": True}}
    asked: Any = {"model": "tictactoe", "instructions": "Play.", "max_output_tokens": 6, **says_something}
    question: Any = {"role": "user", "content": "a1=."}
    first = client.responses.create(**asked, input=[question])
    assert first.model_dump()["store"] is True
    (item,) = first.output
    client.responses.create(**asked, input=[question, item.model_dump(), {"role": "user", "content": "b1"}])
    client.responses.create(**asked, input="b1", previous_response_id=first.id)
    reference: Any = {"type": "item_reference", "id": item.id}
    client.responses.create(**asked, input=[question, reference, {"role": "user", "content": "b1"}])
    _, whole, previous, by_item = await exchanges(broker, "kept")
    assert whole.prompt_ids == previous.prompt_ids == by_item.prompt_ids
    gateway.client(api_key="alice").responses.create(**asked, input="b1", previous_response_id=first.id)
    others = gateway.agent(alice.open(id="other"), max_retries=0), gateway.client(api_key="bob")
    for other in others:
        for options in ({"previous_response_id": first.id, "input": "b1"}, {"input": [reference]}):
            with pytest.raises(openai.BadRequestError) as refused:
                other.responses.create(**asked, **options)
            assert refused.value.code == "previous_response_not_found"
