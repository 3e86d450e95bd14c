"""The model's own forward pass over a layout, in two halves: trunk under our masks, head as the model's class applies
it.

The way from the last hidden state to the logits differs between families: a scale (Granite, Cohere, Falcon-H1), a
soft cap (Gemma2), in most only the head. So the head is never called directly. The class's own `forward` runs with a
stand-in for its trunk that returns hidden states computed before. So logits are computed for the trained positions
only, in pieces, with all operations of the class.

Attention sees along a path of the prefix tree. A layer may see all of it, a sliding window of its last tokens, or the
tokens of one chunk of positions; both are counted in positions along the path, not in columns of the row. Layers that
carry a state from token to token (linear attention, convolutions) can't share a prefix between branches, so each
sequence of such a model gets its own row.

Shape letters as in `trainer.batches.packing`, and D hidden size, V vocabulary, n tokens scored at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.utils.checkpoint
from transformers import PreTrainedModel

from pipeline.config import ConfigError
from trainer.batches.packing import Layout, Reach
from trainer.batches.sampling import cut
from trainer.engine.attention import mask_of

_FULL = ("full_attention", "attention", "global_attention")


def reaches_of(config: Any) -> dict[str, Reach] | None:
    """How far the layers of each type see, by `layer_types` of a text configuration; the type is "" where there is
    only one.

    `None` where some layers carry a state."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    if not types:
        return {"": Reach(window=window or 0)}
    out: dict[str, Reach] = {}
    for kind in sorted(set(types)):
        if kind in _FULL:
            out[kind] = Reach()
        elif kind == "sliding_attention" and window:
            out[kind] = Reach(window=window)
        elif kind == "chunked_attention" and chunk:
            out[kind] = Reach(chunk=chunk)
        else:
            return None
    return out


@dataclass(frozen=True)
class Way:
    """A way of running prefix trees through a model."""

    masks: Literal["by type", "one"]
    """Whether the trunk takes a mask for each type of layer, or a single one."""


def ways_of(config: Any) -> list[Way]:
    """The ways that may work for a text configuration, most likely first; which of them does is found out by trying."""
    reaches = reaches_of(config)
    if reaches is None:
        return []
    ways = [Way("by type")] if "" not in reaches else []
    if len(set(reaches.values())) == 1:
        ways.append(Way("one"))
    return ways


class _Given(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """Replaces the trunk and returns a known output. All other attributes are those of the real trunk."""

    def __init__(self, trunk: torch.nn.Module) -> None:
        super().__init__()
        self.output: Any = None
        self._trunk = (trunk,)  # in a tuple: not as a part of this module

    def __getattr__(self, name: str) -> Any:
        if "_trunk" in self.__dict__:
            return getattr(self._trunk[0], name)
        return super().__getattr__(name)

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


def _trunk_of(model: Any) -> str:
    """The path of the module whose output the head reads. Raises `ConfigError` where there is none."""
    decoder = model.get_decoder()
    if decoder is not model:
        for name, module in model.named_modules():
            if module is decoder:
                return str(name)
    for name, module in model.named_children():  # a class whose `base_model_prefix` names another attribute
        if isinstance(module, PreTrainedModel):
            return str(name)
    raise ConfigError(f"{type(model).__name__} can't be trained here: it has no trunk apart from its head")


class Forward:
    """The two halves of one causal language model (without PEFT's wrapper, whose layers it holds)."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.text = model.config.get_text_config()
        path = _trunk_of(model)
        parent, _, self._leaf = path.rpartition(".")
        self._parent = model.get_submodule(parent)
        self.trunk = model.get_submodule(path)
        self._given = _Given(self.trunk)
        self._output: Any = None
        self.way: Way | None = None
        """How prefix trees are run; `None` if they are not used."""

    @property
    def attention(self) -> str:
        """The name of the attention implementation in use."""
        return str(self.text._attn_implementation)

    def hidden(self, layout: Layout, *, flex: bool = False) -> torch.Tensor:
        """The trunk's last hidden states of a layout, [R, L, D]."""
        output = self.trunk(
            input_ids=layout.ids_RL,
            attention_mask=None if layout.ends_RL is None else self._masks(layout, flex),
            position_ids=layout.positions_RL,
            use_cache=False,
        )
        self._output = type(output)
        hidden_RLD: torch.Tensor = output.last_hidden_state
        return hidden_RLD

    def _masks(self, layout: Layout, flex: bool) -> Any:
        reaches = reaches_of(self.text)
        if self.way is None or reaches is None:
            raise ValueError(f"{type(self.model).__name__} can't share prefixes")
        made = {reach: self._mask(layout, reach, flex) for reach in set(reaches.values())}
        if self.way.masks == "one":
            (mask,) = made.values()
            return mask
        return {kind: made[reach] for kind, reach in reaches.items()}

    def _mask(self, layout: Layout, reach: Reach, flex: bool) -> Any:
        mask: Any = mask_of(layout, flex, reach)
        if self.attention != "eager":
            return mask
        # Eager attention adds its mask to the scores.
        dtype = self.trunk.dtype
        zero = torch.zeros((), dtype=dtype, device=mask.device)
        return torch.where(mask, zero, torch.finfo(dtype).min)

    def logits(self, hidden_nD: torch.Tensor) -> torch.Tensor:
        """The logits of hidden states, [n, V], as the model's own `forward` computes them."""
        assert self._output is not None, "hidden states come from `hidden`"
        ids = torch.zeros((1, len(hidden_nD)), dtype=torch.long, device=hidden_nD.device)
        with self._with(self._output(last_hidden_state=hidden_nD.unsqueeze(0))):
            logits_nV: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits_nV

    def scores(
        self,
        hidden_ND: torch.Tensor,
        targets_N: torch.Tensor,
        temperatures_N: torch.Tensor,
        cuts_N3: torch.Tensor | None,
        chunk: int,
        entropy: Literal["none", "measured", "trained"],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs of the targets and entropies, [N] each, in nats; for more than `chunk`
        positions, logits are computed piece by piece, and again for the gradient."""
        pieces = zip(
            hidden_ND.split(chunk),
            targets_N.split(chunk),
            temperatures_N.split(chunk),
            [None] * -(-len(hidden_ND) // chunk) if cuts_N3 is None else cuts_N3.split(chunk),
            strict=True,
        )
        if len(hidden_ND) <= chunk:
            return self._score(*next(pieces), entropy)
        scored = [
            torch.utils.checkpoint.checkpoint(self._score, *piece, entropy, use_reentrant=False)
            for piece in pieces
        ]
        return torch.cat([s[0] for s in scored]), torch.cat([s[1] for s in scored])

    def _score(
        self,
        hidden_nD: torch.Tensor,
        targets_n: torch.Tensor,
        temperatures_n: torch.Tensor,
        cuts_n3: torch.Tensor | None,
        entropy: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_nV = self.logits(hidden_nD)
        # At least float32: half the digits of a bfloat16 logprob would be noise.
        logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
        logits_nV = logits_nV / temperatures_n.unsqueeze(1)
        if cuts_n3 is not None:
            logits_nV = cut(logits_nV, targets_n, cuts_n3)
        all_nV = torch.log_softmax(logits_nV, dim=-1)
        logprobs_n = all_nV.gather(1, targets_n.unsqueeze(1)).squeeze(1)
        if entropy == "none":
            return logprobs_n, torch.zeros_like(logprobs_n)
        measured = all_nV if entropy == "trained" else all_nV.detach()
        if cuts_n3 is not None:
            measured = measured.masked_fill(measured == -torch.inf, 0.0)  # 0 log 0 is 0; here e^0 times 0 is
        return logprobs_n, -(measured.exp() * measured).sum(-1)

    @contextmanager
    def _with(self, output: Any) -> Iterator[None]:
        self._given.output = output
        self._parent._modules[self._leaf] = self._given
        try:
            yield
        finally:
            self._parent._modules[self._leaf] = self.trunk
            self._given.output = None


def without_noise(model: torch.nn.Module) -> None:
    """Switch off dropout and the jitter of routers: the sampler has neither, and the trainer's logprobs have to equal
    the sampler's. Also switch off the routers' auxiliary loss, which TRL would add to the policy's loss."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("dropout" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)
