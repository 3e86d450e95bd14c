"""The sampling defaults of an inference server, and how settings of sampling change the trainer's logits.

The recorded logprobs are those of the distribution that vLLM sampled from: the policy's distribution at a temperature,
restricted to likely tokens by `top_k`, `top_p` and `min_p`. The trainer applies these to its own logits, so that both
sides use the same distribution. Tokens that were sampled under settings that it can't apply are context
(`pipeline.chat.sampling`), and a metric counts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from pipeline.chat.sampling import Defaults

_OVERRIDE = "--override-generation-config"
_LIKELY = 1024
"""Number of most probable tokens that are ordered, where they decide what `top_k` and `top_p` leave. To order a whole
vocabulary costs more than the rest of the loss."""


def defaults_of(model: Any, flags: Mapping[str, str]) -> Defaults:
    """Return the sampling parameters that a vLLM server uses where a request names none.

    `model` is the served model as transformers loaded it, with its generation_config.json. `flags` are further flags
    of vLLM's command line (`vllm.flags` of the settings)."""
    generation = getattr(model, "generation_config", None)
    ignored = flags.get("--generation-config") == "vllm"
    defaults = generation.to_diff_dict() if generation is not None and not ignored else {}
    # vLLM takes the flag as a JSON object, or one flag for each of its keys.
    override: dict[str, Any] = msgspec.json.decode(flags.get(_OVERRIDE, "{}").encode())
    override |= {f.removeprefix(f"{_OVERRIDE}."): v for f, v in flags.items() if f.startswith(f"{_OVERRIDE}.")}
    names = Defaults.__struct_fields__
    return msgspec.convert({k: v for k, v in (defaults | override).items() if k in names}, Defaults, strict=False)


def restrict(logits_nV: torch.Tensor, targets_n: torch.Tensor, cuts_n3: torch.Tensor) -> torch.Tensor:
    """Return the logits with minus infinity for the tokens that could not be sampled. The restrictions are applied in
    vLLM's order.

    Shape letters: n positions, V vocabulary. `cuts_n3`: top_k, top_p and min_p of each position. If the current policy
    excludes a target, the target keeps its logit, because the policy that sampled it allowed it."""
    top_k_n, top_p_n, min_p_n = cuts_n3.unbind(1)
    restricted_m = ((top_k_n > 0) | (top_p_n < 1) | (min_p_n > 0)).nonzero().squeeze(1)
    if not len(restricted_m):
        return logits_nV
    with torch.no_grad():
        rows_mV = logits_nV[restricted_m].detach().clone()
        least_m = rows_mV.max(-1).values + min_p_n[restricted_m].log()
        rows_mV[rows_mV < least_m.unsqueeze(1)] = -torch.inf
        excluded_mV = ~_allowed(rows_mV, top_k_n[restricted_m], top_p_n[restricted_m])
        excluded_mV.scatter_(1, targets_n[restricted_m].unsqueeze(1), False)
        excluded_nV = torch.zeros(logits_nV.shape, dtype=torch.bool, device=logits_nV.device)
        excluded_nV[restricted_m] = excluded_mV
    return logits_nV.masked_fill(excluded_nV, -torch.inf)


def _allowed(rows_mV: torch.Tensor, top_k_m: torch.Tensor, top_p_m: torch.Tensor) -> torch.Tensor:
    """Return which tokens `top_k` and then `top_p` allow, of the logits of m rows: booleans, [m, V]. All tokens as
    probable as the `top_k`-th are allowed, and the most probable one always is.

    Only the `_LIKELY` most probable tokens are ordered, unless they do not decide a row."""
    size = rows_mV.shape[1]
    k_m1 = torch.where(top_k_m > 0, top_k_m, size).long().clamp(1, size).unsqueeze(1)
    p_m1 = top_p_m.unsqueeze(1)
    whole_m1 = (k_m1 == size) & (p_m1 >= 1)
    count = min(_LIKELY, size)
    while True:  # once, or again with the whole vocabulary
        ordered_mC, places_mC = rows_mV.topk(count, dim=-1)
        kth_m1 = ordered_mC.gather(1, k_m1.clamp(max=count) - 1)
        by_k_m1 = (k_m1 <= count) & (ordered_mC[:, -1:] < kth_m1)
        ordered_mC = ordered_mC.masked_fill(by_k_m1 & (ordered_mC < kth_m1), -torch.inf)
        total_m1 = torch.where(by_k_m1, ordered_mC.logsumexp(-1, keepdim=True), rows_mV.logsumexp(-1, keepdim=True))
        sums_mC = (ordered_mC - total_m1).exp().cumsum(-1)
        decided_m1 = by_k_m1 | whole_m1 | ((k_m1 == size) & (sums_mC[:, -1:] >= p_m1))
        if count == size or bool(decided_m1.all()):
            break
        count = size
    stays_mC = (sums_mC.roll(1, dims=-1) < p_m1) | (p_m1 >= 1)
    stays_mC[:, 0] = True
    allowed_mV = torch.zeros(rows_mV.shape, dtype=torch.bool, device=rows_mV.device)
    allowed_mV.scatter_(1, places_mC, stays_mC & (ordered_mC > -torch.inf))
    return allowed_mV | (whole_m1 & (rows_mV > -torch.inf))
