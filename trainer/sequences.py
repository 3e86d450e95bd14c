"""From captured exchanges to token sequences: exactly what was sampled, never tokenised again.

An exchange whose prompt begins with all of an earlier sequence (prompt and reply, token for token) continues it; one
that does not (the agent rewrote its history, or asked beside it) begins a sequence of its own. Only sampled tokens are
trained: prompts, tool results and user turns are context, and so are tokens that a grammar forced, tokens that were
chosen greedily, and replies that never reached the agent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from pipeline.events import ExchangeRecorded, unpack_ids, unpack_logprobs, unpack_mask

_GREEDY = 1e-5


class _Request(msgspec.Struct):
    temperature: float | None = None


_request = msgspec.json.Decoder(_Request)


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """One token sequence of a trajectory; every array has shape [T]."""

    trajectory: str
    ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    """The sampler's, in nats; NaN where the token was not sampled or its logprob is unknown."""
    steps: npt.NDArray[np.int32]
    """Policy step that sampled the token; -1 for context."""
    temperatures: npt.NDArray[np.float32]
    """Sampling temperature; 1 for context."""

    @property
    def trained_tokens(self) -> int:
        return int(self.trained.sum())

    def without(self, dropped: npt.NDArray[np.bool_]) -> TokenSequence:
        """The same tokens with those under `dropped` (shape [T]) as context."""
        return TokenSequence(
            self.trajectory, self.ids, self.trained & ~dropped, self.logprobs, self.steps, self.temperatures
        )


class _Growing:
    def __init__(self) -> None:
        self.ids: list[npt.NDArray[np.int32]] = []
        self.trained: list[npt.NDArray[np.bool_]] = []
        self.logprobs: list[npt.NDArray[np.float32]] = []
        self.steps: list[npt.NDArray[np.int32]] = []
        self.temperatures: list[npt.NDArray[np.float32]] = []
        self.flat = np.zeros(0, np.int32)

    def begins(self, prompt: npt.NDArray[np.int32]) -> bool:
        return len(self.flat) <= len(prompt) and np.array_equal(self.flat, prompt[: len(self.flat)])

    def add(
        self,
        ids: npt.NDArray[np.int32],
        trained: npt.NDArray[np.bool_],
        logprobs: npt.NDArray[np.float32],
        step: int,
        temperature: float,
    ) -> None:
        n = len(ids)
        self.ids.append(ids)
        self.trained.append(trained)
        self.logprobs.append(logprobs)
        self.steps.append(np.full(n, step, np.int32))
        self.temperatures.append(np.full(n, temperature, np.float32))
        self.flat = np.concatenate([self.flat, ids])

    def add_context(self, ids: npt.NDArray[np.int32]) -> None:
        self.add(ids, np.zeros(len(ids), np.bool_), np.full(len(ids), np.nan, np.float32), -1, 1.0)

    def done(self, trajectory: str) -> TokenSequence:
        trained = np.concatenate(self.trained)
        if len(trained):
            trained[0] = False  # nothing before it predicts the first token
        return TokenSequence(
            trajectory, self.flat, trained, np.concatenate(self.logprobs), np.concatenate(self.steps),
            np.concatenate(self.temperatures),
        )  # fmt: skip


def _temperature(exchange: ExchangeRecorded, default: float) -> float:
    try:
        asked = _request.decode(exchange.request).temperature
    except msgspec.DecodeError:
        asked = None
    return default if asked is None else float(asked)


def build(
    trajectory: str,
    exchanges: Iterable[ExchangeRecorded],
    *,
    default_temperature: float = 1.0,
    mask_truncated: bool = False,
) -> list[TokenSequence]:
    """The sequences of one trajectory that hold at least one token to train, in the order in which they began.

    `default_temperature` is what the inference server uses where a request names none."""
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
        temperature = _temperature(exchange, default_temperature)
        greedy = temperature < _GREEDY
        sequence.add(
            sampled,
            _trainable(exchange, len(sampled), not greedy, mask_truncated),
            _logprobs(exchange, len(sampled)),
            exchange.step,
            1.0 if greedy else temperature,
        )
    return [s for s in (g.done(trajectory) for g in growing) if s.trained.any()]


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


def trained_tokens(sequences: Sequence[TokenSequence]) -> int:
    return sum(s.trained_tokens for s in sequences)
