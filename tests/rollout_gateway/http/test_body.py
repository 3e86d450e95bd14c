"""The reader of JSON bodies names what is wrong."""

import json
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_gateway.http.body import _outline, read_body
from rollout_gateway.http.errors import ApiError


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    size: int = 0


class Part(msgspec.Struct):
    kind: Literal["a", "b"] | None = None


class Body(msgspec.Struct):
    model: str
    inner: Inner | None = None
    outcome: Literal["scored", "masked"] = "scored"
    parts: list[Part] = []


@pytest.mark.parametrize("text", ["", "]]]]]", '\\"]]', "[[[[[", "\\\\"])
@pytest.mark.parametrize(("depth", "taken"), [(199, True), (200, False)])
def test_nesting_has_a_bound(text: str, depth: int, taken: bool) -> None:
    """Whoever decodes the record later does so in deeper calls than the gateway."""
    value: object = msgspec.json.decode(
        b'{"a":[' * (depth // 2) + b"[" * (depth % 2) + b"]" * (depth % 2) + b"]}" * (depth // 2)
    )
    body = msgspec.json.encode({"model": "m", text: [text, {}] * 300, "deep": value})
    if taken:
        assert read_body(body, Body) == Body("m")
    else:
        with pytest.raises(ApiError, match="nested too deeply") as refused:
            read_body(body, Body)
        assert refused.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{}", "invalid_body", "model"),
        (b'{"model": 1}', "invalid_body", "model"),
        (b'{"model": "m", "inner": {"size": "x"}}', "invalid_body", "inner.size"),
        (b'{"model": "m", "inner": {"sise": 1}}', "invalid_body", "inner.sise"),
        (b"[]", "invalid_body", None),
        (b"{", "invalid_json", None),
        (b'{"model": "m", "other": "\xff"}', "invalid_json", None),
        (b'{"model": "m", "inner": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", "invalid_body", "inner"),
    ],
)
def test_an_invalid_body_says_where(body: bytes, code: str, param: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        read_body(body, Body)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, code, param)


@pytest.mark.parametrize("value", [b"{},", b"[],", b"1,", b'"",'])
def test_a_body_of_millions_of_values_is_refused(value: bytes) -> None:
    with pytest.raises(ApiError, match="at most 1,000,000, of which at most 100,000") as refused:
        read_body(b'{"model": "m", "x": [' + value * 1_100_000 + b"1]}", Body)
    assert (refused.value.status, refused.value.code) == (413, "body_too_large")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hostile", [b'"' + b'\\"' * 1_000_000, b'""' * 5_000_000, b'"",' * 5_000_000])
def test_counting_the_values_of_a_hostile_body_takes_linear_time(hostile: bytes) -> None:
    with pytest.raises(ApiError):
        read_body(b"," * 1_000_001 + hostile, Body)


JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a\\",[]{}é:', max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='"\\,{', max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(JSON, st.booleans())
def test_an_outline_holds_the_commas_and_brackets_of_a_bodys_values(value: object, spaced: bool) -> None:
    body = json.dumps(value, indent=1 if spaced else None, ensure_ascii=False).encode()
    assert _outline(body).decode() == _outline_of(value)


def _outline_of(value: object) -> str:
    if isinstance(value, list | dict):
        return f"[{','.join(map(_outline_of, value.values() if isinstance(value, dict) else value))}]"
    return ""
