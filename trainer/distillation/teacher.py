"""Which recorded tokens a teacher is asked about, and what it says of them.

Shape letters: k trained tokens of a sequence, K most probable tokens of the teacher, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.events import ExchangeRecorded, TeacherAnswered, unpack_ids, unpack_logprobs
from trainer.sequences import UNCUT, TokenSequence

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]


@dataclass(frozen=True, eq=False)
class HintedCall:
    """A call as its teacher reads it: with a hint in the prompt, and the recorded tokens of the call after it."""

    sequence: TokenSequence
    """The tokens that it is asked about are those of the loss mask."""
    slots: npt.NDArray[np.int64]
    """Where they are among the k trained tokens of the sequence that is taught."""


@dataclass(frozen=True, eq=False)
class TeacherLogprobs:
    """A teacher's distribution at each of the k trained tokens of a sequence."""

    logprobs_k: Floats
    """Logprobs of the recorded tokens, in nats. NaN: the teacher was not asked."""
    top_ids_kK: npt.NDArray[np.int64]
    """The teacher's most probable tokens. K is 0 where only sampled tokens are compared."""
    top_logprobs_kK: Floats

    @classmethod
    def blank(cls, tokens: int, top: int, dtype: npt.DTypeLike = np.float32) -> TeacherLogprobs:
        """Of a teacher that was asked nothing."""
        unknown = np.full((tokens, top), np.nan, dtype)
        return cls(np.full(tokens, np.nan, dtype), np.zeros((tokens, top), np.int64), unknown)


def hinted_calls_of(sequence: TokenSequence, prompts: Mapping[int, npt.NDArray[np.int32]]) -> tuple[HintedCall, ...]:
    """The calls of a sequence that `prompts` has a teacher's prompt for, by call."""
    if sequence.calls is None:
        return ()
    slots_T = np.cumsum(sequence.loss_mask) - 1
    out = []
    for call, prompt in prompts.items():
        at = np.flatnonzero(sequence.calls == call)
        taught = sequence.loss_mask[at]
        if not taught.any():
            continue
        context = TokenSequence.made_up(sequence.trajectory, prompt, 1)
        untrained = np.zeros(len(prompt), np.bool_)
        cuts = None
        if sequence.cuts is not None:
            cuts = np.concatenate([np.tile(UNCUT, (len(prompt), 1)), sequence.cuts[at]])
        read = TokenSequence(
            sequence.trajectory,
            np.concatenate([context.ids, sequence.ids[at]]),
            np.concatenate([untrained, taught]),
            np.concatenate([context.logprobs, sequence.logprobs[at]]),
            np.concatenate([context.steps, sequence.steps[at]]),
            np.concatenate([context.temperatures, sequence.temperatures[at]]),
            cuts,
        )
        out.append(HintedCall(read, slots_T[at][taught]))
    return tuple(out)


@dataclass(frozen=True, eq=False)
class TeacherAnswer:
    """What a teacher from outside said of the n tokens that a call sampled (`rollout.teacher`)."""

    call: int
    """`seq` of the call."""
    ids_n: npt.NDArray[np.int32]
    logprobs_n: Floats
    top_ids_nK: npt.NDArray[np.int32]
    top_logprobs_nK: Floats


def answers_by_call(event: TeacherAnswered, exchanges: Iterable[ExchangeRecorded]) -> list[TeacherAnswer]:
    """The answers about a run's calls; none if the event is about other tokens."""
    calls = [(e.seq, unpack_ids(e.sampled_ids)) for e in TeacherAnswered.calls_of(exchanges)]
    logprobs, width = unpack_logprobs(event.logprobs), event.top_k
    if not calls or len(logprobs) != sum(len(ids) for _, ids in calls):
        return []
    top_ids = unpack_ids(event.top_ids).reshape(len(logprobs), width)
    top_logprobs = unpack_logprobs(event.top_logprobs).reshape(len(logprobs), width)
    ends = np.cumsum([len(ids) for _, ids in calls])[:-1]
    said = zip(*(np.split(x, ends) for x in (logprobs, top_ids, top_logprobs)), strict=True)
    return [TeacherAnswer(seq, ids, *of_call) for (seq, ids), of_call in zip(calls, said, strict=True)]


def teacher_logprobs_of(sequence: TokenSequence, answers: Sequence[TeacherAnswer]) -> TeacherLogprobs | None:
    """What a teacher from outside said of a sequence's trained tokens; `None` if nothing.

    It is asked at temperature 1. Tokens that were sampled at another temperature learn nothing from it: the policy's
    distribution at that temperature would be drawn to the teacher's at 1, and its own away from the teacher's."""
    if not answers or sequence.calls is None:
        return None
    whole = TeacherLogprobs.blank(len(sequence.ids), answers[0].top_ids_nK.shape[1])
    for answer in answers:
        at = np.flatnonzero(sequence.calls == answer.call)
        if np.array_equal(sequence.ids[at], answer.ids_n):  # else it is another choice of the call
            whole.logprobs_k[at] = answer.logprobs_n
            whole.top_ids_kK[at] = answer.top_ids_nK
            whole.top_logprobs_kK[at] = answer.top_logprobs_nK
    whole.logprobs_k[sequence.temperatures != 1] = np.nan
    whole.top_logprobs_kK[sequence.temperatures != 1] = np.nan
    trained = sequence.loss_mask
    part = TeacherLogprobs(whole.logprobs_k[trained], whole.top_ids_kK[trained], whole.top_logprobs_kK[trained])
    return None if np.isnan(part.logprobs_k).all() else part


def join_logprobs(tokens: int, parts: Sequence[tuple[HintedCall, TeacherLogprobs]]) -> TeacherLogprobs | None:
    """The teacher's logprobs of a sequence's `tokens` trained tokens, from those of its hinted calls. `None` if there
    are none."""
    if not parts:
        return None
    first = parts[0][1]
    whole = TeacherLogprobs.blank(tokens, first.top_ids_kK.shape[1], first.logprobs_k.dtype)
    for hinted, part in parts:
        whole.logprobs_k[hinted.slots] = part.logprobs_k
        whole.top_ids_kK[hinted.slots] = part.top_ids_kK
        whole.top_logprobs_kK[hinted.slots] = part.top_logprobs_kK
    return whole


def metrics(teacher_logprobs: Sequence[TeacherLogprobs | None], logprobs: Sequence[Floats]) -> dict[str, float]:
    """`tokens_taught`, and `teacher_gap`: the mean of log policy - log teacher over these tokens, which estimates the
    reverse KL divergence in nats. `logprobs[i]` are the policy's of sequence i before the step."""
    gaps = [
        (mine - said.logprobs_k)[~np.isnan(said.logprobs_k)]
        for said, mine in zip(teacher_logprobs, logprobs, strict=True)
        if said is not None
    ]
    if not gaps:
        return {}
    gap = np.concatenate(gaps)
    return {"tokens_taught": float(len(gap)), "teacher_gap": float(gap.mean()) if len(gap) else 0.0}
