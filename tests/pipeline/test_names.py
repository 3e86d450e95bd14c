"""Identifiers can be read back from subjects."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.names import (
    MAX_NAME,
    InvalidNameError,
    is_base_version,
    is_version,
    new_dated_id,
    parse_version,
    subject_token,
    time_of_id,
    version_address,
    version_name,
)


@example("m")
@example("m@07")
@example("m@" + "9" * 5000)
@given(st.from_regex(r"(m|m@)@[\d+\-_ \n²]{1,22}", fullmatch=True) | st.text())
def test_a_version_has_one_spelling(text: str) -> None:
    try:
        model, step = parse_version(text)
    except InvalidNameError:
        assert not is_version(text)
    else:
        assert is_version(text)
        assert version_name(model, step) == text
        assert is_base_version(text) == (step == 0)


@pytest.mark.parametrize("bad", ["", "a\nb", "x" * (MAX_NAME + 1), ".", ".."])
def test_what_can_not_be_a_name_says_why(bad: str) -> None:
    with pytest.raises(InvalidNameError):
        subject_token(bad)


@pytest.mark.parametrize("bad", ["m", "m@", "m@07", "m@²"])
def test_a_version_without_a_step_says_so(bad: str) -> None:
    with pytest.raises(InvalidNameError):
        parse_version(bad)


def test_an_address_of_a_version_escapes_what_parts_it() -> None:
    assert version_address("main", "Qwen-2.5:x@3") == "main/Qwen-2.5:x@3"
    assert version_address("a/b", "org/m@1@3") == "a%2Fb/org%2Fm%401@3"


def test_a_dated_id_carries_its_time_and_other_names_carry_none() -> None:
    before = int(time.time())
    name = new_dated_id("t")
    assert before <= time_of_id(name) <= time.time()
    assert subject_token(name) == name
    assert time_of_id("t-20000101T000000Z-" + "0" * 20) == 946684800
    for other in ("mine", "t-" + "0" * 20, "t-20001399T000000Z-" + "0" * 20, "t-20000101T000000Z-x", ""):
        assert time_of_id(other) == 0
