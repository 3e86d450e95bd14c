"""Reads the sampling settings of a call, and applies them to the trainer's logits.

The recorded logprobs are those of the distribution that vLLM sampled from: the policy's distribution at a temperature,
restricted to likely tokens by `top_k`, `top_p` and `min_p`, and changed by penalties and biases. The request names
these settings; for those that it does not name, vLLM uses the model's generation_config.json.

The trainer applies temperature, `top_k`, `top_p` and `min_p` to its own logits, so that both sides use the same
distribution. It does not apply settings that depend on more than the logits of a position (penalties, biases, lists of
allowed or forbidden tokens). Tokens that were sampled under them become context, and a metric counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

GREEDY = 1e-5
"""A temperature below this means greedy decoding."""


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


def defaults_of(model: Any, arguments: Sequence[str] = ()) -> Defaults:
    """Return the defaults of a vLLM server.

    `model` is the served model as transformers loaded it, with its generation_config.json. `arguments` are further
    arguments of vLLM's command line."""
    override: dict[str, Any] = {}
    known = dict(zip(arguments, [*arguments[1:], ""], strict=False))
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals:
            known[name] = value
    generation = getattr(model, "generation_config", None)
    ignored = known.get("--generation-config") == "vllm"
    found = generation.to_diff_dict() if generation is not None and not ignored else {}
    if text := known.get("--override-generation-config"):
        override = msgspec.json.decode(text.encode())
    names = Defaults.__struct_fields__
    return msgspec.convert(
        {k: v for k, v in (found | override).items() if k in names}, Defaults, strict=False
    )


class _Request(Defaults, frozen=True):
    """The sampling settings of a request body."""

    min_tokens: int | None = None
    logit_bias: dict[str, Any] | None = None
    bad_words: list[Any] | None = None
    allowed_token_ids: list[Any] | None = None
    logits_processors: list[Any] | None = None
    vllm_xargs: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Request, strict=False)


class Sampling(msgspec.Struct, frozen=True):
    """How the tokens of one call were sampled."""

    temperature: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    unsupported: str = ""
    """Names of the settings that the trainer can't apply, separated by commas; empty if it can apply all."""

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY

    @property
    def restricts(self) -> bool:
        """Whether `top_k`, `top_p` or `min_p` exclude tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def sampling_of(request: bytes, defaults: Defaults) -> Sampling:
    """Return the sampling settings of a request body (JSON). A body that can't be decoded names none."""
    try:
        settings = _decoder.decode(request)
    except msgspec.DecodeError:
        settings = _Request()

    def effective(name: str, neutral: float) -> float:
        """Return a setting of the request, else the server's default, else the value without effect."""
        value = getattr(settings, name)
        value = getattr(defaults, name) if value is None else value
        return neutral if value is None else value

    unsupported = [
        name
        for name, neutral in (("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0))
        if effective(name, neutral) != neutral
    ]  # fmt: skip
    unsupported += [
        name
        for name in ("min_tokens", "logit_bias", "bad_words", "allowed_token_ids", "logits_processors", "vllm_xargs")
        if getattr(settings, name)
    ]  # fmt: skip
    return Sampling(
        temperature=float(effective("temperature", 1.0)),
        top_k=max(0, int(effective("top_k", 0))),
        top_p=float(effective("top_p", 1.0)),
        min_p=float(effective("min_p", 0.0)),
        unsupported=", ".join(unsupported),
    )


def restrict(logits_nV: torch.Tensor, targets_n: torch.Tensor, cuts_n3: torch.Tensor) -> torch.Tensor:
    """Return the logits with minus infinity for the tokens that could not be sampled. The restrictions are applied in
    vLLM's order.

    Shape letters: n positions, V vocabulary. `cuts_n3`: top_k, top_p and min_p of each position. If the current policy
    excludes a target, the target keeps its logit, because the policy that sampled it allowed it."""
    top_k_n, top_p_n, min_p_n = cuts_n3.unbind(1)
    some = ((top_k_n > 0) | (top_p_n < 1) | (min_p_n > 0)).nonzero().squeeze(1)
    if not len(some):
        return logits_nV
    with torch.no_grad():
        rows_mV = logits_nV[some].detach().clone()
        least_m = rows_mV.max(-1).values + min_p_n[some].log()
        rows_mV[rows_mV < least_m.unsqueeze(1)] = -torch.inf
        ordered_mV, places_mV = rows_mV.sort(dim=-1)
        size = rows_mV.shape[1]
        k_m = torch.where(top_k_n[some] > 0, top_k_n[some], size).long().clamp(1, size)
        kth_m1 = ordered_mV.gather(1, (size - k_m).unsqueeze(1))
        ordered_mV[ordered_mV < kth_m1] = -torch.inf
        gone_mV = ordered_mV.softmax(-1).cumsum(-1) <= 1 - top_p_n[some].unsqueeze(1)
        gone_mV[:, -1] = False
        gone_mV |= ordered_mV == -torch.inf
        out_mV = torch.zeros_like(gone_mV).scatter(1, places_mV, gone_mV)
        out_mV.scatter_(1, targets_n[some].unsqueeze(1), False)
        out_nV = torch.zeros(logits_nV.shape, dtype=torch.bool, device=logits_nV.device)
        out_nV[some] = out_mV
    return logits_nV.masked_fill(out_nV, -torch.inf)
