"""What of an agent's call reaches a provider."""

import json
import tracemalloc
from typing import Any

import pytest

from pipeline.config import OutsideConfig
from rollout_gateway.http.errors import ApiError
from rollout_gateway.outside.requests import CHAT, PATHS, OutsideCall, headers_for, read_call

TABLE = OutsideConfig(name="m", url="http://x", model="big", ask_usage=False)


def sent(body: bytes) -> bytes:
    call = read_call(CHAT, body, {"m": [TABLE]})
    assert call is not None
    return call.body_for(TABLE)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":@}',
        b' {"tools": [{"model":"m"}], "a\\"b" : "\\"model\\":\\"m\\"",\n "model" :\t@ , "x":{"model":"m"} } ',
        b'{"messages":[],"model":@,"metadata":{"model":"m"}}',
    ],
)
def test_only_the_bytes_of_the_model_change(body: bytes) -> None:
    assert sent(body.replace(b"@", b'"m"')) == body.replace(b"@", b'"big"')
    assert sent(body.replace(b"@", b'"\\u006d"')) == body.replace(b"@", b'"big"')


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"secret","model":"m"}',
        b'{"model":"m","model":"m"}',
        b'{"mod\\u0065l":"n","model":"m"}',
        b'{"a":"m","a":"m","model":"m"}',
        b'{"a":1,"model":"m","a":1}',
        b'{"a":12,"model":"m","a":1}',
        b'{"model":"m","Model":"expensive"}',
        b'{"MODEL":"expensive","model":"m"}',
        json.dumps({**{f"f{i}": i for i in range(2000)}, "model": "m"}).encode(),
    ],
)
def test_request_that_could_name_two_models_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        sent(body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_body")


@pytest.mark.parametrize("field", ["metadata", "n", "stream", "other"])
def test_values_are_bounded_before_they_are_decoded(field: str) -> None:
    body = b'{"model":"m","%b":[%b0]}' % (field.encode(), b"[]," * 2_000_000)
    tracemalloc.start()
    with pytest.raises(ApiError) as refused:
        sent(body)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused.value.status == 413
    assert most < 4 * len(body)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"previous_response_id": "resp_1"}, {"previous_response_id": "resp_2"}),
        ({"background": True}, {}),
        ({"input": [{"type": "item_reference", "id": "a"}]}, {"input": [{"type": "item_reference", "id": "b"}]}),
    ],
)
def test_requests_that_differ_in_what_the_record_lacks_are_no_retries_of_each_other(first: Any, second: Any) -> None:
    responses = OutsideConfig(name="m", url="http://x", dialect="responses")

    def read(fields: Any) -> OutsideCall:
        body = json.dumps({"model": "m", "input": "hi", **fields}).encode()
        call = read_call(PATHS["responses"], body, {"m": [responses]})
        assert call is not None
        return call

    assert read(first).body == read(second).body
    assert read(first).hash() == read(first).hash() != read(second).hash()


def test_headers_outside_ascii_keep_their_bytes_or_do_not_pass() -> None:
    name = "grüße".encode()
    passed = headers_for({b"user-agent": name, b"x-stainless-os": "ü".encode("latin-1")}, "chat", "")
    assert passed["user-agent"].encode() == name
    assert "x-stainless-os" not in passed


def test_headers_that_are_not_known_do_not_reach_the_provider() -> None:
    names = """api-key x_api_key x-api-key authorization cookie openai-organization openai-project x-real-ip forwarded
    x-forwarded-for x-http-method-override range content-md5 http2-settings connection x-journeywork-trajectory"""
    sent_headers = dict.fromkeys(names.encode().split(), b"x") | {b"openai-beta": b"1", b"x-stainless-lang": b"js"}
    passed = headers_for(sent_headers, "chat", "")
    assert passed == {"openai-beta": "1", "x-stainless-lang": "js", "accept-encoding": "identity"}
