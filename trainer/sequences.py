"""Captured exchanges to token sequences: the tokens that were sampled, never tokenised again.

An exchange whose prompt begins with all tokens of an earlier sequence (prompt and reply) continues that sequence.
Any other exchange begins a new one: the agent rewrote its history, or made a call beside it. Only sampled tokens
are trained, those that `pipeline.chat.sampling` names. Prompts, tool results and user turns are context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.chat.images import media_of
from pipeline.chat.sampling import NO_DEFAULTS, Defaults, Sampling, loss_mask, sampling_of, untrained_reason
from pipeline.events import ExchangeRecorded, unpack_ids, unpack_logprobs, unpack_mask
from pipeline.names import is_outside

OTHER_BRANCH = 2**30
"""Step of a token that a version of another branch sampled, which this branch does not have. It is later than every
step, as that of a replay's later version is."""
UNCUT = np.array([0, 1, 0], np.float32)
"""top_k, top_p and min_p of a token that was sampled from the whole distribution."""


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """One token sequence of a trajectory; every array has shape [T]."""

    trajectory: str
    ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    """True for the tokens that are trained."""
    logprobs: npt.NDArray[np.float32]
    """Logprobs of the sampler in nats; NaN where the token was not sampled or its logprob is unknown."""
    steps: npt.NDArray[np.int32]
    """Policy step that sampled each token; -1 for context, `OTHER_BRANCH` where this branch lacks the version."""
    temperatures: npt.NDArray[np.float32]
    """Sampling temperature; 1 for context."""
    cuts: npt.NDArray[np.float32] | None = None
    """top_k, top_p and min_p of each token, shape [T, 3]; `None` where no token was sampled under any of them."""
    calls: npt.NDArray[np.int32] | None = None
    """The call that sampled each token: `seq` of its exchange, -1 for context. `None`: not known."""
    images: tuple[bytes, ...] = ()
    """The files of the images whose places are among the ids, in their order."""

    @classmethod
    def made_up(cls, name: str, ids: npt.NDArray[np.integer[Any]], trained: int) -> TokenSequence:
        """Return a sequence for a measurement or a check: its last `trained` tokens are trained, and none has a
        recorded logprob."""
        n = len(ids)
        loss_mask = np.arange(n) >= max(1, n - trained)
        unknown = np.full(n, np.nan, np.float32)
        return cls(name, ids.astype(np.int32), loss_mask, unknown, np.zeros(n, np.int32), np.ones(n, np.float32))

    @property
    def trained_tokens(self) -> int:
        """Number of tokens that are trained."""
        return int(self.loss_mask.sum())

    def masking_out(self, untrained: npt.NDArray[np.bool_]) -> TokenSequence:
        """Return the sequence with the same tokens; those where `untrained` (shape [T]) is true are context."""
        return replace(self, loss_mask=self.loss_mask & ~untrained)


class _Builder:
    """Builds one sequence from the prompts and replies of successive calls."""

    def __init__(self) -> None:
        self.ids = np.zeros(0, np.int32)
        self.images: tuple[bytes, ...] = ()
        self._parts: list[tuple[npt.NDArray[Any], ...]] = []
        """Loss mask, logprobs, steps, temperatures, cuts and calls of every part added."""

    def is_prefix_of(self, prompt: npt.NDArray[np.int32]) -> bool:
        """Whether `prompt` begins with the tokens added so far."""
        return len(self.ids) <= len(prompt) and np.array_equal(self.ids, prompt[: len(self.ids)])

    def add(
        self,
        ids: npt.NDArray[np.int32],
        loss_mask: npt.NDArray[np.bool_],
        logprobs: npt.NDArray[np.float32],
        step: int,
        sampling: Sampling,
        call: int,
    ) -> None:
        """Append tokens of the call with the number `call`, -1 for context; `step` is that of the policy that sampled
        them. `loss_mask` and `logprobs` as in `TokenSequence`."""
        n = len(ids)
        steps, temperatures = np.full(n, step, np.int32), np.full(n, sampling.temperature, np.float32)
        cuts = np.tile(np.array([sampling.top_k, sampling.top_p, sampling.min_p], np.float32), (n, 1))
        calls = np.full(n, call, np.int32)
        self._parts.append((loss_mask, logprobs, steps, temperatures, cuts, calls))
        self.ids = np.concatenate([self.ids, ids])

    def add_context(self, ids: npt.NDArray[np.int32]) -> None:
        """Append tokens that are not trained."""
        n = len(ids)
        self.add(ids, np.zeros(n, np.bool_), np.full(n, np.nan, np.float32), -1, Sampling(), -1)

    def sequence(self, trajectory: str) -> TokenSequence:
        """Return the tokens added so far as a sequence of the run `trajectory`."""
        parts = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        loss_mask, logprobs, steps, temperatures, cuts, calls = parts
        loss_mask[:1] = False  # no token before it predicts the first one
        uncut = (cuts == UNCUT).all()
        return TokenSequence(
            trajectory, self.ids, loss_mask, logprobs, steps, temperatures, None if uncut else cuts, calls, self.images
        )


_NOT_IN_THE_CONVERSATION = ("side_call", "cancelled", "failed", "unsure")
"""Reasons of `untrained_reason` for which a reply is no part of the conversation either: it is not even context of
later calls. A reply that is not trained for another reason is context."""


def build(
    trajectory: str,
    exchanges: Iterable[ExchangeRecorded],
    *,
    defaults: Defaults = NO_DEFAULTS,
    mask_truncated: bool = False,
    left_out: Counter[str] | None = None,
) -> list[TokenSequence]:
    """The sequences of one trajectory that hold at least one token to train, in the order in which they began.

    Two calls with the prompts A and A b C, of which the first was answered by b and the second by d, are one sequence,
    A b C d, of which b and d are trained. A third call with another prompt begins a second sequence.

    `defaults` are the sampling settings that the inference server uses where a request names none. With
    `mask_truncated`, replies that were cut off at their length limit are context. Calls that an outside model answered
    are left out: whatever they hold, the policy did not sample it. `left_out` is increased by the number of sampled
    tokens that are not trained because of an unsupported sampling setting, by the setting."""
    builders: list[_Builder] = []
    for exchange in _in_order(exchanges):
        if is_outside(exchange.policy_version):
            continue
        sampling = sampling_of(exchange.request, defaults)
        reason = untrained_reason(
            status=exchange.status,
            side_call=exchange.side_call,
            finish_reason=exchange.finish_reason,
            sampling=sampling,
            mask_truncated=mask_truncated,
        )
        sampled = unpack_ids(exchange.sampled_ids)
        if reason in _NOT_IN_THE_CONVERSATION or not len(sampled):
            continue
        if sampling.unsupported and left_out is not None:
            left_out[sampling.unsupported] += len(sampled)
        builder = _with_prompt(builders, unpack_ids(exchange.prompt_ids), media_of(exchange.request).images)
        # The trainer can't compute the distribution of the others, which are context.
        reproducible = not sampling.greedy and not sampling.unsupported
        builder.add(
            sampled,
            loss_mask(reason, unpack_mask(exchange.forced), len(sampled)),
            _logprobs(exchange, len(sampled)),
            exchange.step,
            sampling if reproducible else Sampling(),
            exchange.seq,
        )
    sequences = [builder.sequence(trajectory) for builder in builders]
    return [sequence for sequence in sequences if sequence.loss_mask.any()]


def _in_order(exchanges: Iterable[ExchangeRecorded]) -> list[ExchangeRecorded]:
    """Return a run's exchanges in the order of their calls and choices. An exchange that was recorded twice, as after a
    retry, is returned once."""
    unique: dict[tuple[int, int], ExchangeRecorded] = {}
    for exchange in exchanges:
        unique.setdefault((exchange.seq, exchange.choice), exchange)
    return [unique[key] for key in sorted(unique)]


def _with_prompt(builders: list[_Builder], prompt: npt.NDArray[np.int32], images: tuple[bytes, ...]) -> _Builder:
    """Return the builder of the sequence that a call continues, after adding the call's prompt to it as context. It is
    that of the longest sequence that the prompt begins with, else a new one, which is added to `builders`. Prompts with
    different images may have the same tokens, so the images must be the same, too."""
    prefixes = [b for b in builders if b.is_prefix_of(prompt) and b.images == images[: len(b.images)]]
    builder = max(prefixes, key=lambda b: len(b.ids), default=None)
    if builder is None:
        builder = _Builder()
        builders.append(builder)
    builder.add_context(prompt[len(builder.ids) :])
    builder.images = images
    return builder


def _logprobs(exchange: ExchangeRecorded, length: int) -> npt.NDArray[np.float32]:
    """Return the recorded logprobs of a call's `length` sampled tokens; NaN for all of them if another number was
    recorded."""
    logprobs = unpack_logprobs(exchange.logprobs)
    # Where the numbers differ, no logprob can be assigned to its token.
    return logprobs if len(logprobs) == length else np.full(length, np.nan, np.float32)
