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


def defaults_of(model: Any, flags: Mapping[str, str]) -> Defaults:
    """Return the defaults of a vLLM server.

    `model` is the served model as transformers loaded it, with its generation_config.json. `flags` are further flags
    of vLLM's command line (`vllm.flags` of the settings)."""
    generation = getattr(model, "generation_config", None)
    ignored = flags.get("--generation-config") == "vllm"
    defaults = generation.to_diff_dict() if generation is not None and not ignored else {}
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
