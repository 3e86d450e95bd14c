"""How the tokens of a call were sampled, and which of them are trained.

The trainer and the pages of the store use the same rule: the tokens of a complete reply of the agent are trained,
except those that a grammar forced. A reply is context as a whole where its settings leave no distribution to learn
from (greedy decoding), or one that the trainer can't compute (penalties, biases, lists of tokens, media that the
record does not hold).

The request names the settings; for those that it does not name, vLLM uses the model's generation_config.json.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from pipeline.chat.images import media_of

GREEDY = 1e-5
"""A temperature below this means greedy decoding."""
_MIN_TEMPERATURE = 0.01
"""vLLM samples at this temperature where a lower one is asked for, unless it is greedy."""


class Defaults(msgspec.Struct, frozen=True):
    """Sampling settings that the inference server uses if a request does not name them. `None`: the server has no
    default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


NO_DEFAULTS = Defaults()


class _Request(Defaults, frozen=True):
    """The sampling settings of a request body."""

    min_tokens: int | None = None
    thinking_token_budget: int | None = None
    logit_bias: dict[str, Any] | None = None
    bad_words: list[Any] | None = None
    allowed_token_ids: list[Any] | None = None
    logits_processors: list[Any] | None = None
    vllm_xargs: dict[str, Any] | None = None


UNREADABLE = "the request can't be decoded"
"""What `Sampling.unsupported` says of a request whose settings are unknown."""
_decoder = msgspec.json.Decoder(_Request, strict=False)


class Sampling(msgspec.Struct, frozen=True):
    """How the tokens of one call were sampled."""

    temperature: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    unsupported: str = ""
    """Names of the settings that the trainer can't apply and of the media that it does not have, or that the request
    can't be decoded, separated by commas; empty if it can compute the call."""

    @property
    def greedy(self) -> bool:
        """Whether the most probable token was taken each time."""
        return self.temperature < GREEDY


def sampling_of(request: bytes, defaults: Defaults) -> Sampling:
    """Return the sampling settings of a request body (JSON). Those of a body that can't be decoded are unknown, so that
    it is unsupported."""
    unsupported = []
    try:
        settings = _decoder.decode(request)
    except (msgspec.DecodeError, RecursionError):
        settings = _Request()
        unsupported.append(UNREADABLE)

    def effective(name: str, neutral: float) -> float:
        """Return a setting of the request, else the server's default, else the value without effect."""
        value = getattr(settings, name)
        value = getattr(defaults, name) if value is None else value
        return neutral if value is None else value

    unsupported += [
        name
        for name, neutral in (("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0))
        if effective(name, neutral) != neutral
    ]
    unsupported += [
        name
        for name in ("min_tokens", "logit_bias", "bad_words", "allowed_token_ids", "logits_processors", "vllm_xargs")
        if getattr(settings, name)
    ]
    if settings.thinking_token_budget is not None:
        # At the budget, vLLM chooses the tokens that end the thinking.
        unsupported.append("thinking_token_budget")
    if unusable := media_of(request).unusable:
        unsupported.append(unusable)
    temperature = float(effective("temperature", 1.0))
    return Sampling(
        temperature=max(temperature, _MIN_TEMPERATURE) if temperature >= GREEDY else temperature,
        top_k=max(0, int(effective("top_k", 0))),
        top_p=float(effective("top_p", 1.0)),
        min_p=float(effective("min_p", 0.0)),
        unsupported=", ".join(unsupported),
    )


Untrained = Literal["", "side_call", "cancelled", "failed", "unsure", "truncated", "greedy", "unsupported"]
"""Why no token of a reply is trained; empty: its unforced tokens are."""


def untrained_reason(
    *, status: str, side_call: bool, finish_reason: str, sampling: Sampling, mask_truncated: bool = False
) -> Untrained:
    """Return why no token of a recorded reply is trained. `mask_truncated`: the trainer's setting."""
    if side_call:
        return "side_call"
    if status != "complete":
        return "cancelled" if status == "cancelled" else "unsure" if status == "unsure" else "failed"
    if mask_truncated and finish_reason == "length":
        return "truncated"
    return "greedy" if sampling.greedy else "unsupported" if sampling.unsupported else ""


def loss_mask(reason: Untrained, forced: npt.NDArray[Any], length: int) -> npt.NDArray[np.bool_]:
    """Return for each of `length` sampled tokens whether it is trained. `forced`, shape [length] or [0]: nonzero where
    a grammar left no choice."""
    if reason:
        return np.zeros(length, np.bool_)
    return forced == 0 if len(forced) == length else np.ones(length, np.bool_)
