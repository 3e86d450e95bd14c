"""From captured exchanges to token sequences: exactly what was sampled, never tokenised again.

An exchange whose prompt begins with all of an earlier sequence (prompt and reply, token for token) continues it; one
that does not (the agent rewrote its history, or asked beside it) begins a sequence of its own. Only sampled tokens are
trained: prompts, tool results and user turns are context, and so are tokens that a grammar forced, tokens that were
chosen greedily or under penalties and biases (`trainer.batches.sampling`), and replies that never reached the agent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.events import ExchangeRecorded, unpack_ids, unpack_logprobs, unpack_mask
from trainer.batches.sampling import NO_DEFAULTS, Defaults, Sampling, sampling_of

_UNCUT = np.array([0, 1, 0], np.float32)


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """One token sequence of a trajectory; every array has shape [T]."""

    trajectory: str
    ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    """True for the tokens that are trained."""
    logprobs: npt.NDArray[np.float32]
    """The sampler's, in nats; NaN where the token was not sampled or its logprob is unknown."""
    steps: npt.NDArray[np.int32]
    """Policy step that sampled the token; -1 for context."""
    temperatures: npt.NDArray[np.float32]
    """Sampling temperature; 1 for context."""
    cuts: npt.NDArray[np.float32] | None = None
    """top_k, top_p and min_p of every token, shape [T, 3]; `None` where none of them cut anything."""

    @property
    def trained_tokens(self) -> int:
        return int(self.loss_mask.sum())

    def without(self, dropped: npt.NDArray[np.bool_]) -> TokenSequence:
        """The same tokens with those under `dropped` (shape [T]) as context."""
        return TokenSequence(
            self.trajectory,
            self.ids,
            self.loss_mask & ~dropped,
            self.logprobs,
            self.steps,
            self.temperatures,
            self.cuts,
        )


class _Growing:
    def __init__(self) -> None:
        self.ids: list[npt.NDArray[np.int32]] = []
        self.loss_mask: list[npt.NDArray[np.bool_]] = []
        self.logprobs: list[npt.NDArray[np.float32]] = []
        self.steps: list[npt.NDArray[np.int32]] = []
        self.temperatures: list[npt.NDArray[np.float32]] = []
        self.cuts: list[npt.NDArray[np.float32]] = []
        self.flat = np.zeros(0, np.int32)

    def begins(self, prompt: npt.NDArray[np.int32]) -> bool:
        return len(self.flat) <= len(prompt) and np.array_equal(self.flat, prompt[: len(self.flat)])

    def add(
        self,
        ids: npt.NDArray[np.int32],
        loss_mask: npt.NDArray[np.bool_],
        logprobs: npt.NDArray[np.float32],
        step: int,
        sampling: Sampling,
    ) -> None:
        n = len(ids)
        self.ids.append(ids)
        self.loss_mask.append(loss_mask)
        self.logprobs.append(logprobs)
        self.steps.append(np.full(n, step, np.int32))
        self.temperatures.append(np.full(n, sampling.temperature, np.float32))
        self.cuts.append(
            np.tile(np.array([sampling.top_k, sampling.top_p, sampling.min_p], np.float32), (n, 1))
        )
        self.flat = np.concatenate([self.flat, ids])

    def add_context(self, ids: npt.NDArray[np.int32]) -> None:
        self.add(ids, np.zeros(len(ids), np.bool_), np.full(len(ids), np.nan, np.float32), -1, Sampling())

    def done(self, trajectory: str) -> TokenSequence:
        loss_mask = np.concatenate(self.loss_mask)
        if len(loss_mask):
            loss_mask[0] = False  # nothing before it predicts the first token
        return TokenSequence(
            trajectory, self.flat, loss_mask, np.concatenate(self.logprobs), np.concatenate(self.steps),
            np.concatenate(self.temperatures), self._cuts(),
        )  # fmt: skip

    def _cuts(self) -> npt.NDArray[np.float32] | None:
        cuts = np.concatenate(self.cuts)
        return None if (cuts == _UNCUT).all() else cuts


def build(
    trajectory: str,
    exchanges: Iterable[ExchangeRecorded],
    *,
    defaults: Defaults = NO_DEFAULTS,
    mask_truncated: bool = False,
    left_out: Counter[str] | None = None,
) -> list[TokenSequence]:
    """The sequences of one trajectory that hold at least one token to train, in the order in which they began.

    `defaults` is what the inference server uses where a request names nothing. `left_out` counts the sampled tokens that are
    not trained because of how they were sampled, by the settings that did it."""
    unique: dict[tuple[int, int], ExchangeRecorded] = {}
    for exchange in exchanges:
        unique.setdefault((exchange.seq, exchange.choice), exchange)
    growing: list[_Growing] = []
    for key in sorted(unique):
        exchange = unique[key]
        if exchange.side_call or exchange.status != "complete":
            continue
        prompt, sampled = unpack_ids(exchange.prompt_ids), unpack_ids(exchange.sampled_ids)
        if not len(sampled):
            continue
        fitting = [g for g in growing if g.begins(prompt)]
        sequence = max(fitting, key=lambda g: len(g.flat), default=None)
        if sequence is None:
            sequence = _Growing()
            growing.append(sequence)
        sequence.add_context(prompt[len(sequence.flat) :])
        sampling = sampling_of(exchange.request, defaults)
        follows = not sampling.greedy and not sampling.bent_by
        if sampling.bent_by and left_out is not None:
            left_out[sampling.bent_by] += len(sampled)
        sequence.add(
            sampled,
            _trainable(exchange, len(sampled), follows, mask_truncated),
            _logprobs(exchange, len(sampled)),
            exchange.step,
            sampling if follows else Sampling(),
        )
    return [s for s in (g.done(trajectory) for g in growing) if s.loss_mask.any()]


def _trainable(
    exchange: ExchangeRecorded, length: int, chosen: bool, mask_truncated: bool
) -> npt.NDArray[np.bool_]:
    if not chosen or (mask_truncated and exchange.finish_reason == "length"):
        return np.zeros(length, np.bool_)
    forced = unpack_mask(exchange.forced)
    return forced == 0 if len(forced) == length else np.ones(length, np.bool_)


def _logprobs(exchange: ExchangeRecorded, length: int) -> npt.NDArray[np.float32]:
    logprobs = unpack_logprobs(exchange.logprobs)
    # Logprobs that do not match the tokens one to one say nothing about any of them.
    return logprobs if len(logprobs) == length else np.full(length, np.nan, np.float32)
