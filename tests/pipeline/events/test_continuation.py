"""Exchanges that are recorded as what follows an earlier one come back bit for bit, or not at all."""

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.events import Continuation, ExchangeRecorded, decode, encode
from pipeline.events.continuation import (
    Base,
    BrokenChainError,
    Form,
    base_of,
    common_prefix,
    common_suffix,
    continue_from,
    find_base,
    key_of,
    restore,
)
from pipeline.log.exchanges import RememberedExchanges
from tests.kits.conversations import CHUNK, chat, exchange, growing, runs
from trainer.sequences import build

MEMORIES = st.sampled_from([0, 15_000, 10_000_000])


def written(exchanges: list[ExchangeRecorded], memories: list[RememberedExchanges], by: list[int]) -> list[Form]:
    """What writers with these memories put on the log; `by` says which of them writes each exchange. A writer sees what
    others wrote only if it takes the next call after it."""
    out: list[Form] = []
    for i, whole in enumerate(exchanges):
        memory = memories[by[i % len(by)] % len(memories)]
        form = decode(encode(memory.shortest(whole)))
        assert isinstance(form, ExchangeRecorded | Continuation)
        memory.add(whole, form)
        out.append(form)
    return out


def read(form: Form, memory: RememberedExchanges, held: list[Form]) -> ExchangeRecorded:
    if isinstance(form, Continuation):
        base = memory.find("p", "t", base_of(form)) or find_base(form, {key_of(f): f for f in held})
        whole = restore(base, form)
    else:
        whole = form
    memory.add(whole, form)
    return whole


@settings(max_examples=120)
@given(
    runs(), st.lists(MEMORIES, min_size=1, max_size=3), st.lists(st.integers(0, 2), min_size=1), MEMORIES, st.randoms()
)
def test_every_run_comes_back_as_it_was_and_trains_the_same_sequences(
    exchanges: list[ExchangeRecorded], writers: list[int], by: list[int], reader: int, order: random.Random
) -> None:
    held = written(exchanges, [RememberedExchanges(size) for size in writers], by)
    memory = RememberedExchanges(reader)
    assert [read(form, memory, held) for form in held] == exchanges
    shuffled = list(zip(held, exchanges, strict=True))
    order.shuffle(shuffled)
    other = RememberedExchanges(reader)
    back = [(read(form, other, held), whole) for form, whole in shuffled]
    assert all(restored == whole for restored, whole in back)
    trained = zip(build("t", [r for r, _ in back]), build("t", exchanges), strict=True)
    for one, two in trained:
        for name in ("ids", "loss_mask", "logprobs", "steps", "temperatures"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


@given(
    st.lists(st.sampled_from([b"a", b"b", b"a" * 70]), max_size=12),
    st.lists(st.sampled_from([b"a", b"b", b"a" * 70]), max_size=12),
)
def test_common_beginnings_and_ends_are_as_long_as_they_can_be(one: list[bytes], two: list[bytes]) -> None:
    a, b = b"".join(one), b"".join(two)
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]
    most = min(len(a), len(b)) // 2
    n = common_suffix(a, b, most)
    assert a[len(a) - n :] == b[len(b) - n :]
    assert n == most or a[-1 - n] != b[-1 - n]


def test_a_growing_run_takes_the_bytes_of_what_is_new() -> None:
    exchanges, memory = growing(20), RememberedExchanges(1_000_000)
    forms = written(exchanges, [memory], [0])
    assert [type(f) for f in forms] == [ExchangeRecorded] + 19 * [Continuation]
    sizes = [len(encode(f)) for f in forms]
    assert max(sizes[1:]) < 1.1 * min(sizes[1:])
    assert memory.bytes == Base(exchanges[-1]).size  # each takes the place of the one that it repeats


def test_the_longest_earlier_prefix_is_continued_not_the_last_one() -> None:
    memory, said = RememberedExchanges(1_000_000), ["m" * 2_000, "n" * 2_000]
    main = exchange(0, [1] * 800, [2] * CHUNK, chat(said))
    side = exchange(1, [9] * 800, [3] * CHUNK, chat(["title?" * 600]))
    for one in (main, side):
        memory.add(one, memory.shortest(one))
    form = memory.shortest(exchange(2, [1] * 800 + [2] * CHUNK + [5], [6], chat([*said, "more"])))
    assert isinstance(form, Continuation)
    assert (base_of(form), form.tokens) == (key_of(main), 800 + CHUNK)


def test_memory_is_bounded_and_forgets_the_trajectory_that_was_unused_longest() -> None:
    memory = RememberedExchanges(50_000)
    names = [f"t{i}" for i in range(30)]
    for name in names:
        one = msgspec.structs.replace(exchange(0, [1] * CHUNK, [2], chat(["x" * 3_000])), trajectory=name)
        memory.add(one, one)
    assert 0 < memory.bytes <= 50_000
    assert [n for n in names if memory.find("p", n, key_of(one))] == names[-(memory.bytes // Base(one).size) :]


def test_a_missing_other_or_shorter_predecessor_is_an_error_and_never_other_tokens() -> None:
    first, second, third = growing(3)
    one = continue_from(Base(first), second)
    two = continue_from(Base(second), third)
    assert one is not None
    assert two is not None
    held: dict[object, Form] = {key_of(f): f for f in (first, one, two)}
    assert find_base(two, held).tokens == Base(second).tokens  # type: ignore[arg-type]
    with pytest.raises(
        BrokenChainError, match=r"exchange 0\.0, which exchange 1\.0 of trajectory 't' continues, is no"
    ):
        find_base(two, {key_of(one): one})
    with pytest.raises(BrokenChainError, match=r"exchange 1\.0, which"):
        find_base(two, {key_of(first): first})
    # Another exchange with the same number, written after a power cut.
    later = msgspec.structs.replace(first, at=first.at + 1)
    with pytest.raises(BrokenChainError, match="no longer in the log"):
        find_base(one, {key_of(later): later})
    # One that was changed.
    other = msgspec.structs.replace(first, request=first.request.replace(b"s", b"t"))
    with pytest.raises(BrokenChainError, match=r"exchange 0\.0 is not what exchange 1\.0"):
        restore(Base(other), one)
    for wrong in ({"tokens": 10_000}, {"request_head": -1}, {"request_tail": 10**6}):
        with pytest.raises(BrokenChainError, match="is shorter than"):
            restore(Base(first), msgspec.structs.replace(one, **wrong))
    itself = msgspec.structs.replace(one, seq=1, at=second.at)
    with pytest.raises(BrokenChainError):
        find_base(itself, {key_of(itself): itself})
