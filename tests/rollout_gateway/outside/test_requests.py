"""What of an agent's call reaches a provider."""

from __future__ import annotations

import json
import time

import pytest

from pipeline.config import OutsideConfig
from rollout_gateway.outside.requests import CHAT, headers_for, read_call

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


def test_request_with_a_field_that_comes_twice_has_the_last_one() -> None:
    for body in (b'{"model":"m","model":"m"}', b'{"a":"m","a":"m","model":"m"}', b'{"model":"n","a":1,"model":"m"}'):
        assert json.loads(sent(body)) == json.loads(body) | {"model": "big"}
    many = {**{f"f{i}": i for i in range(2000)}, "model": "m"}
    assert json.loads(sent(json.dumps(many).encode())) == many | {"model": "big"}


def test_many_places_that_look_like_the_models_cost_one_pass() -> None:
    body = b'{"tools":[' + b",".join([b'{"model":"m"}'] * 16_000) + b'],"model":@}'
    call = read_call(CHAT, body.replace(b"@", b'"m"'), {"m": [TABLE]})
    assert call is not None
    started = time.process_time()
    assert call.body_for(TABLE) == body.replace(b"@", b'"big"')
    assert time.process_time() - started < 0.5


def test_headers_outside_ascii_keep_their_bytes_or_do_not_pass() -> None:
    name = "grüße".encode()
    passed = headers_for({b"x-name": name, b"x-latin": "ü".encode("latin-1")}, "chat", "")
    assert passed["x-name"].encode() == name
    assert "x-latin" not in passed
