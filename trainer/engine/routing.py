"""Router replay: in a mixture of experts, a token goes to the experts that the sampler chose for it.

Sampler and trainer compute in different orders, and versions differ, so a router may choose other experts in training
than it did in sampling; the logprob of such a token then differs by whole nats. With `trainer.router_replay` the
recorded choice takes the place of the router's own. The weights of the chosen experts are computed from the current
router's scores, so gradients flow through them as before ("Stabilizing MoE Reinforcement Learning by Aligning Training
and Inference Routers", Ma et al., 2025).

Every router of transformers chooses by `topk` over the scores of all experts. During a router's forward pass this call
returns the recorded experts and their scores.

Shape letters as in `trainer.batches.packing`, and M layers of the model, E experts of a layer, k experts of a token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode

_TOPK = (torch.topk, torch.Tensor.topk)


class RouterReplay:
    """Replays recorded choices in the routers of `model`. `k` is 0 where it has none."""

    def __init__(self, model: Any) -> None:
        layers = getattr(model.get_decoder(), "layers", ())
        self.layers, self.k, self.experts = len(layers), 0, 0
        self._chosen_TMk: torch.Tensor | None = None
        for index, layer in enumerate(layers):
            for router in filter(_is_router, layer.modules()):
                self.k, self.experts = int(router.top_k), _experts_of(router)
                router.forward = _ReplayedForward(self, router, index)

    def set(self, experts_RLMk: torch.Tensor | None) -> None:
        """Choose these experts in all forward passes from now on, also in those that the backward pass makes again:
        -1 leaves the choice to the router. `None`: the router chooses."""
        self._chosen_TMk = None if experts_RLMk is None else experts_RLMk.flatten(0, 1).long()

    def experts_at(self, layer: int) -> torch.Tensor | None:
        """Return the choices for a layer, [T, k] for the T = R L tokens of the pass; `None`: the router chooses."""
        return None if self._chosen_TMk is None else self._chosen_TMk[:, layer]

    def why_unfit(self, experts_TMk: npt.NDArray[np.int16]) -> str:
        """Return why choices are not this model's; an empty string if they are."""
        (_, layers, k), largest = experts_TMk.shape, int(experts_TMk.max(initial=-1))
        if (layers, k) != (self.layers, self.k) or largest >= self.experts:
            return (
                f"the sampler chose {k} experts up to number {largest} in {layers} layers, and the model has "
                f"{self.experts} experts in {self.layers} layers and chooses {self.k}: does the inference server serve "
                "another model?"
            )
        return ""


class _ReplayedForward:
    """The forward pass of a router."""

    def __init__(self, replay: RouterReplay, router: Any, layer: int) -> None:
        self._replay, self._router, self._layer, self._own = replay, router, layer, router.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chosen_Tk = self._replay.experts_at(self._layer)
        if chosen_Tk is None:
            return self._own(*args, **kwargs)
        with _ChosenTopK(chosen_Tk, self._replay.experts):
            return self._own(*args, **kwargs)


class _ChosenTopK(TorchFunctionMode):  # type: ignore[misc]  # torch has no types here
    """Lets `topk` over the scores of all experts return the chosen ones."""

    def __init__(self, chosen_Tk: torch.Tensor, experts: int) -> None:
        super().__init__()
        self._chosen_Tk, self._experts = chosen_Tk, experts

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        k = self._chosen_Tk.shape[-1]
        if func not in _TOPK or args[0].shape[-1] != self._experts or out.indices.shape[-1] != k:
            return out
        chosen = self._chosen_Tk.reshape(out.indices.shape)
        indices = torch.where(chosen < 0, out.indices, chosen)
        return torch.return_types.topk((args[0].gather(-1, indices), indices))


def _is_router(module: torch.nn.Module) -> bool:
    named = "Router" in type(module).__name__
    return named and isinstance(getattr(module, "top_k", None), int) and _experts_of(module) > 0


def _experts_of(module: Any) -> int:
    """Return the number of experts among which a router chooses."""
    weight = getattr(module, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, torch.Tensor) and weight.dim() == 2 else 0
