"""Requests to vLLM's endpoints that are refused before vLLM sees them, and what is kept of its answers."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rollout_gateway.dialects.endpoints import read_chat, read_completion
from rollout_gateway.dialects.messages import MessagesTranslation
from rollout_gateway.dialects.responses import ResponsesTranslation
from rollout_gateway.http.errors import ApiError


@pytest.mark.parametrize(
    ("read", "prompt"),
    [
        (read_chat, {"messages": []}),
        (read_completion, {"prompt": "x"}),
        (MessagesTranslation, {"messages": []}),
        (ResponsesTranslation, {"input": "x"}),
    ],
)
@pytest.mark.parametrize("seed", [b"9" * 5000, b"9223372036854775808", b"1.5", b'"x"'])
def test_a_seed_must_be_a_64_bit_integer(read: Callable[[bytes], object], prompt: dict[str, Any], seed: bytes) -> None:
    body = {"model": "m", **prompt}
    read(msgspec.json.encode({**body, "seed": -(2**63)}))
    read(msgspec.json.encode({**body, "seed": None}))
    with pytest.raises(ApiError) as refused:
        read(msgspec.json.encode({**body, "seed": msgspec.Raw(seed)}))
    error = refused.value
    assert (error.status, error.code, error.param) == (400, "invalid_body", "seed")


@pytest.mark.parametrize("number", [0, 1])
def test_logprobs_of_a_chat_completion_are_true_or_false(number: int) -> None:
    # vLLM reads 0 as false, and answers without the logprobs that the gateway records.
    with pytest.raises(ApiError) as refused:
        read_chat(msgspec.json.encode({"model": "m", "messages": [], "logprobs": number}))
    assert (refused.value.status, refused.value.param) == (400, "logprobs")
    assert read_completion(msgspec.json.encode({"model": "m", "prompt": "x", "logprobs": number})).params.wants_logprobs
