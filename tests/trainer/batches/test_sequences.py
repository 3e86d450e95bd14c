"""Pinned semantics: which tokens train. A change here needs a decision record."""

from __future__ import annotations

import numpy as np

from pipeline.events import pack_logprobs
from pipeline.sampling import Defaults
from tests.trainer.kit import exchange
from trainer.batches.sequences import TokenSequence, build


def tokens(sequence: TokenSequence) -> list[tuple[int, bool]]:
    return list(zip(sequence.ids.tolist(), sequence.loss_mask.tolist(), strict=True))


def trained(sequence: TokenSequence) -> list[int]:
    return sequence.ids[sequence.loss_mask].tolist()


def test_a_prompt_that_extends_the_conversation_continues_its_sequence() -> None:
    (sequence,) = build("t", [exchange("t", 0, [5, 6], [7, 1]), exchange("t", 1, [5, 6, 7, 1, 8, 9], [3, 1])])
    assert sequence.ids.tolist() == [5, 6, 7, 1, 8, 9, 3, 1]
    assert trained(sequence) == [7, 1, 3, 1]


def test_tool_and_user_turns_are_context() -> None:
    tool_result = [20, 21, 22]
    (sequence,) = build(
        "t", [exchange("t", 0, [5], [7]), exchange("t", 1, [5, 7, *tool_result], [8]),
        exchange("t", 2, [5, 7, *tool_result, 8, 30], [9])]
    )  # fmt: skip
    assert trained(sequence) == [7, 8, 9]
    assert not np.isin(sequence.ids[sequence.loss_mask], [*tool_result, 30, 5]).any()
    assert (sequence.steps[~sequence.loss_mask] == -1).all()
    assert sequence.calls is not None
    assert sequence.calls.tolist() == [-1, 0, -1, -1, -1, 1, -1, 2]


def test_a_rewritten_history_begins_a_sequence_of_its_own() -> None:
    """An agent that drops its own reasoning from the history: nothing is trained twice, nothing is lost."""
    first, second = build("t", [exchange("t", 0, [5, 6], [7, 8]), exchange("t", 1, [5, 6, 8, 9], [3])])
    assert (first.ids.tolist(), trained(first)) == ([5, 6, 7, 8], [7, 8])
    assert (second.ids.tolist(), trained(second)) == ([5, 6, 8, 9, 3], [3])


def test_interleaved_histories_continue_their_own_sequences() -> None:
    """Two conversations of one agent, turn about."""
    a, b = build(
        "t",
        [
            exchange("t", 0, [5], [7]),
            exchange("t", 1, [6], [8]),
            exchange("t", 2, [5, 7, 10], [11]),
            exchange("t", 3, [6, 8, 12], [13]),
        ],
    )
    assert a.ids.tolist() == [5, 7, 10, 11]
    assert b.ids.tolist() == [6, 8, 12, 13]


def test_choices_of_one_call_are_sequences_and_the_chosen_one_continues() -> None:
    one, two = build(
        "t",
        [
            exchange("t", 0, [5], [7], choice=0),
            exchange("t", 0, [5], [8], choice=1),
            exchange("t", 1, [5, 8, 9], [3]),
        ],
    )
    assert one.ids.tolist() == [5, 7]
    assert two.ids.tolist() == [5, 8, 9, 3]


def test_tokens_forced_by_a_grammar_are_context() -> None:
    (sequence,) = build("t", [exchange("t", 0, [5], [7, 8, 9], forced=[1, 0, 1])])
    assert tokens(sequence) == [(5, False), (7, False), (8, True), (9, False)]


def test_side_calls_and_broken_calls_train_nothing() -> None:
    assert build("t", [exchange("t", 0, [5], [7], side_call=True)]) == []
    assert build("t", [exchange("t", 0, [5], [7], status="cancelled")]) == []
    assert build("t", [exchange("t", 0, [5], [7], status="failed")]) == []
    assert build("t", [exchange("t", 0, [5], [])]) == []


def test_greedy_replies_are_context() -> None:
    """At temperature 0 nothing was sampled, so there is no probability to push."""
    (sequence,) = build(
        "t", [exchange("t", 0, [5], [7], request=b'{"temperature":0}'), exchange("t", 1, [5, 7, 6], [8])]
    )
    assert trained(sequence) == [8]


def test_temperature_is_the_requests_or_the_servers() -> None:
    asked, default = exchange("t", 0, [5], [7], request=b'{"temperature":0.5}'), exchange("t", 1, [6], [8])
    one, two = build("t", [asked, default], defaults=Defaults(temperature=0.7))
    assert one.temperatures.tolist() == [1.0, 0.5]
    assert two.temperatures[1] == np.float32(0.7)


def test_truncated_replies_train_unless_told_otherwise() -> None:
    cut = exchange("t", 0, [5], [7, 8], finish_reason="length")
    assert trained(build("t", [cut])[0]) == [7, 8]
    assert build("t", [cut], mask_truncated=True) == []


def test_a_truncated_reply_stays_context_of_what_follows() -> None:
    cut = exchange("t", 0, [5], [7, 8], finish_reason="length")
    (sequence,) = build("t", [cut, exchange("t", 1, [5, 7, 8, 1, 6], [9])], mask_truncated=True)
    assert trained(sequence) == [9]


def test_every_token_keeps_the_version_that_sampled_it() -> None:
    (sequence,) = build(
        "t", [exchange("t", 0, [5], [7], step=3), exchange("t", 1, [5, 7, 6], [8, 9], step=4)]
    )
    assert sequence.steps.tolist() == [-1, 3, -1, 4, 4]


def test_logprobs_that_do_not_match_the_tokens_are_unknown() -> None:
    (sequence,) = build("t", [exchange("t", 0, [5], [7, 8], logprobs=[-1.0])])
    assert np.isnan(sequence.logprobs).all()
    assert trained(sequence) == [7, 8]


def test_an_exchange_delivered_twice_counts_once() -> None:
    once = exchange("t", 0, [5], [7])
    again = exchange("t", 0, [5], [7])
    assert [s.ids.tolist() for s in build("t", [once, again])] == [[5, 7]]


def test_order_on_the_log_does_not_matter() -> None:
    first, second = exchange("t", 0, [5], [7]), exchange("t", 1, [5, 7, 6], [8])
    (sequence,) = build("t", [second, first])
    assert sequence.ids.tolist() == [5, 7, 6, 8]


def test_a_token_without_anything_before_it_is_not_trained() -> None:
    (sequence,) = build("t", [exchange("t", 0, [], [7, 8])])
    assert trained(sequence) == [8]


def test_logprobs_are_those_recorded() -> None:
    recorded = exchange("t", 0, [5], [7, 8], logprobs=[-0.25, float("nan")])
    assert recorded.logprobs == pack_logprobs([-0.25, float("nan")])
    (sequence,) = build("t", [recorded])
    np.testing.assert_array_equal(sequence.logprobs, np.array([np.nan, -0.25, np.nan], np.float32))
