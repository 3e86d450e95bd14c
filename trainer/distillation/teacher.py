"""The recorded tokens that a teacher is asked about, and its logprobs of them.

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
    """The teacher is asked about the tokens of its loss mask."""
    slots: npt.NDArray[np.int64]
    """The indices of these tokens among the k trained tokens of the sequence that is taught."""


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
        """Return the logprobs of a teacher that was asked about none of `tokens` tokens: NaN, with `top` columns."""
        unknown = np.full((tokens, top), np.nan, dtype)
        return cls(np.full(tokens, np.nan, dtype), np.zeros((tokens, top), np.int64), unknown)


def hinted_calls_of(sequence: TokenSequence, prompts: Mapping[int, npt.NDArray[np.int32]]) -> tuple[HintedCall, ...]:
    """Return the calls of a sequence that have a teacher's prompt. `prompts`: token ids by the call's number."""
    if sequence.calls is None:
        return ()
    slots_T = np.cumsum(sequence.loss_mask) - 1
    out = []
    for call, prompt in prompts.items():
        at = np.flatnonzero(sequence.calls == call)
        trained = sequence.loss_mask[at]
        if not trained.any():
            continue
        context = TokenSequence.made_up(sequence.trajectory, prompt, 1)
        untrained = np.zeros(len(prompt), np.bool_)
        cuts = None
        if sequence.cuts is not None:
            cuts = np.concatenate([np.tile(UNCUT, (len(prompt), 1)), sequence.cuts[at]])
        hinted = TokenSequence(
            sequence.trajectory,
            np.concatenate([context.ids, sequence.ids[at]]),
            np.concatenate([untrained, trained]),
            np.concatenate([context.logprobs, sequence.logprobs[at]]),
            np.concatenate([context.steps, sequence.steps[at]]),
            np.concatenate([context.temperatures, sequence.temperatures[at]]),
            cuts,
        )
        out.append(HintedCall(hinted, slots_T[at][trained]))
    return tuple(out)


@dataclass(frozen=True, eq=False)
class TeacherAnswer:
    """The logprobs of the n tokens that a call sampled, by a teacher from outside (`rollout.teacher`)."""

    call: int
    """`seq` of the call."""
    ids_n: npt.NDArray[np.int32]
    logprobs_n: Floats
    top_ids_nK: npt.NDArray[np.int32]
    top_logprobs_nK: Floats


def answers_by_call(event: TeacherAnswered, exchanges: Iterable[ExchangeRecorded]) -> list[TeacherAnswer]:
    """Return a teacher's answers about a run's calls; none if the event has another number of tokens than the calls."""
    calls = [(e.seq, unpack_ids(e.sampled_ids)) for e in TeacherAnswered.calls_of(exchanges)]
    logprobs, width = unpack_logprobs(event.logprobs), event.top_k
    if not calls or len(logprobs) != sum(len(ids) for _, ids in calls):
        return []
    top_ids = unpack_ids(event.top_ids).reshape(len(logprobs), width)
    top_logprobs = unpack_logprobs(event.top_logprobs).reshape(len(logprobs), width)
    ends = np.cumsum([len(ids) for _, ids in calls])[:-1]
    parts = zip(*(np.split(values, ends) for values in (logprobs, top_ids, top_logprobs)), strict=True)
    return [TeacherAnswer(seq, ids, *of_call) for (seq, ids), of_call in zip(calls, parts, strict=True)]


def teacher_logprobs_of(sequence: TokenSequence, answers: Sequence[TeacherAnswer]) -> TeacherLogprobs | None:
    """Return the logprobs of a sequence's trained tokens by a teacher from outside; `None` if it gave none.

    The teacher's logprobs are of temperature 1, so those of tokens that were sampled at another temperature are left
    out: they would pull the policy's distribution at that temperature to the teacher's at 1."""
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
    """Return the teacher's logprobs of a sequence's `tokens` trained tokens, from those of its hinted calls in `parts`.
    `None` if there are no parts."""
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
    """Return the metrics `tokens_taught`, the number of tokens with a teacher's logprob, and `teacher_gap`: the mean of
    log policy - log teacher over these tokens, which estimates the reverse KL divergence in nats. `logprobs[i]` are the
    policy's of sequence i before the step. No metrics without a teacher."""
    gaps = [
        (by_policy - by_teacher.logprobs_k)[~np.isnan(by_teacher.logprobs_k)]
        for by_teacher, by_policy in zip(teacher_logprobs, logprobs, strict=True)
        if by_teacher is not None
    ]
    if not gaps:
        return {}
    gap = np.concatenate(gaps)
    return {"tokens_taught": float(len(gap)), "teacher_gap": float(gap.mean()) if len(gap) else 0.0}
