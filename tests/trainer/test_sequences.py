"""Pinned semantics: which tokens train. A change here needs a decision record."""

from functools import partial

import numpy as np
import pytest

from pipeline.chat.sampling import Defaults
from pipeline.events import ExchangeRecorded
from tests.trainer.kit import exchange
from trainer.sequences import TokenSequence, build


def trained(sequence: TokenSequence) -> list[int]:
    return sequence.ids[sequence.loss_mask].tolist()


call = partial(exchange, "t")
CASES: dict[str, tuple[list[ExchangeRecorded], list[tuple[list[int], list[int]]]]] = {
    "a prompt that extends the conversation continues its sequence": (
        [call(0, [5, 6], [7, 1]), call(1, [5, 6, 7, 1, 8, 9], [3, 1])],
        [([5, 6, 7, 1, 8, 9, 3, 1], [7, 1, 3, 1])],
    ),
    # An agent that drops its own reasoning from the history: nothing is trained twice, nothing is lost.
    "a rewritten history begins a sequence of its own": (
        [call(0, [5, 6], [7, 8]), call(1, [5, 6, 8, 9], [3])],
        [([5, 6, 7, 8], [7, 8]), ([5, 6, 8, 9, 3], [3])],
    ),
    "two conversations, turn about": (
        [call(0, [5], [7]), call(1, [6], [8]), call(2, [5, 7, 10], [11]), call(3, [6, 8, 12], [13])],
        [([5, 7, 10, 11], [7, 11]), ([6, 8, 12, 13], [8, 13])],
    ),
    "choices of one call are sequences, and the chosen one continues": (
        [call(0, [5], [7], choice=0), call(0, [5], [8], choice=1), call(1, [5, 8, 9], [3])],
        [([5, 7], [7]), ([5, 8, 9, 3], [8, 3])],
    ),
    "tokens forced by a grammar are context": ([call(0, [5], [7, 8, 9], forced=[1, 0, 1])], [([5, 7, 8, 9], [8])]),
    "a side call": ([call(0, [5], [7], side_call=True)], []),
    "a cancelled call": ([call(0, [5], [7], status="cancelled")], []),
    "an answer that was not shown": ([call(0, [5], [7], status="unsure")], []),
    "a failed call": ([call(0, [5], [7], status="failed")], []),
    "a call without a reply": ([call(0, [5], [])], []),
    # At temperature 0 nothing was sampled, so there is no probability to push.
    "greedy replies are context": (
        [call(0, [5], [7], request=b'{"temperature":0}'), call(1, [5, 7, 6], [8])],
        [([5, 7, 6, 8], [8])],
    ),
    "an exchange delivered twice counts once": ([call(0, [5], [7]), call(0, [5], [7])], [([5, 7], [7])]),
    "the order on the log does not matter": ([call(1, [5, 7, 6], [8]), call(0, [5], [7])], [([5, 7, 6, 8], [7, 8])]),
    "a token without anything before it": ([call(0, [], [7, 8])], [([7, 8], [8])]),
}
"""Exchanges of a run, and for each of its sequences the tokens and those of them that train."""


@pytest.mark.parametrize("case", CASES)
def test_what_a_run_trains(case: str) -> None:
    exchanges, expected = CASES[case]
    assert [(s.ids.tolist(), trained(s)) for s in build("t", exchanges)] == expected


def test_temperature_is_the_requests_or_the_servers() -> None:
    asked, default = exchange("t", 0, [5], [7], request=b'{"temperature":0.5}'), exchange("t", 1, [6], [8])
    one, two = build("t", [asked, default], defaults=Defaults(temperature=0.7))
    assert one.temperatures.tolist() == [1.0, 0.5]
    assert two.temperatures[1] == np.float32(0.7)


def test_logprobs_that_do_not_match_the_tokens_are_unknown() -> None:
    (sequence,) = build("t", [exchange("t", 0, [5], [7, 8], logprobs=[-1.0])])
    assert np.isnan(sequence.logprobs).all()
    assert trained(sequence) == [7, 8]


def test_truncated_replies_train_unless_told_otherwise_and_stay_context_of_what_follows() -> None:
    cut, more = call(0, [5], [7, 8], finish_reason="length"), call(1, [5, 7, 8, 1, 6], [9])
    for mask_truncated, expected in ((False, [7, 8, 9]), (True, [9])):
        (sequence,) = build("t", [cut, more], mask_truncated=mask_truncated)
        assert trained(sequence) == expected
    assert build("t", [cut], mask_truncated=True) == []


def test_every_token_keeps_the_call_and_the_version_that_sampled_it() -> None:
    (sequence,) = build("t", [call(0, [5], [7], step=3), call(1, [5, 7, 20, 6], [8, 9], step=4)])
    assert sequence.steps.tolist() == [-1, 3, -1, -1, 4, 4]
    assert sequence.calls is not None
    assert sequence.calls.tolist() == [-1, 0, -1, -1, 1, 1]
