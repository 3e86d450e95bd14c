"""A causal language model's forward pass over a layout, split in two: trunk with our attention masks, and head.

Between the last hidden state and the logits, some model families scale (Granite, Cohere, Falcon-H1) or cap (Gemma2) the
values. The head module is therefore never called directly: the model class's own `forward` runs with a stub in place
of the trunk, and the stub returns hidden states that were computed before. This way logits are computed for the trained
positions only and in chunks, and the class's own scaling and capping are applied to them.

A token attends to its ancestors in the prefix tree. A layer attends to all of them, to a sliding window, or to a chunk
of positions. Windows and chunks are measured in positions along the sequence, not in columns of the row. Layers that
carry a recurrent state (linear attention, convolutions) can't share a prefix between branches: for a model with such
layers every sequence gets its own row.

Shape letters as in `trainer.batches.packing`, and D hidden size, V vocabulary, n tokens computed at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.utils.checkpoint
from transformers import PreTrainedModel

from pipeline.config import ConfigError
from trainer.batches.packing import AttentionSpan, Layout
from trainer.batches.sampling import restrict
from trainer.engine.images import ImageInputs, ImageUnusableError
from trainer.engine.loss import reverse_kl
from trainer.engine.parallel import ProcessGroup
from trainer.engine.sharding import ShardedModel
from trainer.engine.tree_attention import mask_with_plan, use_tree_attention

_FULL = ("full_attention", "attention", "global_attention")


def attention_spans(config: Any) -> dict[str, AttentionSpan] | None:
    """Return the attention span of each layer type of a text configuration.

    The keys are the values of `layer_types`, or "" if the configuration has none. Returns `None` if a layer type is
    not known here, for example one that carries a recurrent state."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    if not types:
        return {"": AttentionSpan(window=window or 0)}
    out: dict[str, AttentionSpan] = {}
    for kind in sorted(set(types)):
        if kind in _FULL:
            out[kind] = AttentionSpan()
        elif kind == "sliding_attention" and window:
            out[kind] = AttentionSpan(window=window)
        elif kind == "chunked_attention" and chunk:
            out[kind] = AttentionSpan(chunk=chunk)
        else:
            return None
    return out


MaskFormat = Literal["by_layer_type", "single"]
"""The form in which a trunk takes attention masks: a dict with one mask for each layer type, or one for all layers."""


def mask_formats(config: Any) -> list[MaskFormat]:
    """The mask formats that the trunk of a text configuration may accept, most likely first.

    Only a forward pass shows which one it does accept (`trainer.engine.verify`). Empty if prefixes can't be shared."""
    spans = attention_spans(config)
    if spans is None:
        return []
    formats: list[MaskFormat] = ["by_layer_type"] if "" not in spans else []
    if len(set(spans.values())) == 1:
        formats.append("single")
    return formats


class _TrunkStub(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """Takes the place of a trunk and returns `output`. All other attributes are read from the trunk."""

    def __init__(self, trunk: torch.nn.Module) -> None:
        super().__init__()
        self.output: Any = None
        self._trunk = (trunk,)  # in a tuple, so that it is not registered as a submodule

    def __getattr__(self, name: str) -> Any:
        if "_trunk" in self.__dict__:
            return getattr(self._trunk[0], name)
        return super().__getattr__(name)

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


def towers_of(model: Any) -> list[str]:
    """Return the paths of the modules beside the text model of a vision-language model, such as its vision tower; empty
    for a text model."""
    if getattr(model.config, "vision_config", None) is None:
        return []
    parent, _, leaf = _path_in(model, model.get_decoder()).rpartition(".")
    beside = (name for name, _ in model.get_submodule(parent).named_children() if name != leaf)
    return [f"{parent}.{name}" for name in beside] if parent else []


def _path_in(model: Any, module: Any) -> str:
    """Return the path of a module of `model`, or an empty string."""
    return next((str(name) for name, other in model.named_modules() if other is module), "")


def _trunk_of(model: Any) -> str:
    """Return the path of the trunk: the module whose output the head reads. Raises `ConfigError` if there is none."""
    decoder = model.get_decoder()
    if towers_of(model):  # the trunk puts the images' features in their places
        return _path_in(model, decoder).rpartition(".")[0]
    if decoder is not model and (path := _path_in(model, decoder)):
        return path
    for name, module in model.named_children():  # `base_model_prefix` may name another attribute
        if isinstance(module, PreTrainedModel):
            return str(name)
    raise ConfigError(f"{type(model).__name__} can't be trained: no trunk module separate from the head was found")


class Forward:
    """The trunk and the head of a causal language model. `model` is the model inside PEFT's wrapper. `images` makes the
    model's inputs of images; without it, layouts must hold no images."""

    def __init__(self, model: Any, images: ImageInputs | None = None) -> None:
        use_tree_attention()
        self.model, self.images = model, images
        self.text = model.config.get_text_config()
        """The configuration of the language model, which is a part of a vision-language model's."""
        path = _trunk_of(model)
        parent, _, self._leaf = path.rpartition(".")
        self._parent = model.get_submodule(parent)
        self.trunk = model.get_submodule(path)
        self._stub = _TrunkStub(self.trunk)
        self._output: Any = None
        """The class of the trunk's output, of which `logits` makes one. Known once the trunk has run."""
        self._shards: ShardedModel | None = None
        self.mask_format: MaskFormat | None = None
        """The mask format that the trunk accepts, which `trainer.engine.verify` finds. `None` if prefixes can't be
        shared."""

    def shard(self, device: torch.device, process_group: ProcessGroup) -> None:
        """Divide the model's weights among the processes, and move this one's share to `device`."""
        self._shards = ShardedModel(self.model, self.trunk, device, process_group)

    def one_pass(self) -> AbstractContextManager[None]:
        """Return the context in which one forward pass and its backward pass have to run. It holds the weights of a
        divided model's head together."""
        return nullcontext() if self._shards is None else self._shards.whole_head()

    @property
    def attention(self) -> str:
        """The name of the attention implementation in use."""
        return str(self.text._attn_implementation)

    def hidden(self, layout: Layout) -> torch.Tensor:
        """Run the trunk over a layout. Returns its last hidden states, [R, L, D]."""
        output = self.trunk(
            input_ids=layout.ids_RL,
            attention_mask=None if layout.ends_RL is None else self._masks(layout),
            position_ids=layout.positions_RL,
            use_cache=False,
            **self._image_inputs(layout),
        )
        self._output = type(output)
        hidden_RLD: torch.Tensor = output.last_hidden_state
        return hidden_RLD

    def _image_inputs(self, layout: Layout) -> dict[str, torch.Tensor]:
        """Return the trunk's further inputs for the images of a layout; empty without images. Raises
        `ImageUnusableError` if the model is trained without images."""
        if not layout.images:
            return {}
        if self.images is None:
            raise ImageUnusableError(f"{type(self.model).__name__} is trained without images")
        return self.images.inputs(layout.ids_RL, layout.images)

    def _masks(self, layout: Layout) -> Any:
        """Return the attention masks of a layout with branches, in the format that the trunk takes."""
        spans = attention_spans(self.text)
        if self.mask_format is None or spans is None:
            raise ValueError(f"{type(self.model).__name__} can't share prefixes: use a padded layout")
        masks = {span: self._mask(layout, span) for span in set(spans.values())}
        if self.mask_format == "single":
            (mask,) = masks.values()
            return mask
        return {layer_type: masks[span] for layer_type, span in spans.items()}

    def _mask(self, layout: Layout, span: AttentionSpan) -> Any:
        """Return the attention mask of the layers with this span: booleans for attention by scaled dot products,
        numbers that are added to the attention scores for eager attention."""
        if self.attention != "eager":
            return mask_with_plan(layout, span)
        mask: Any = layout.dense_mask(span)
        # True becomes 0 and false the lowest number.
        dtype = self.trunk.dtype
        zero = torch.zeros((), dtype=dtype, device=mask.device)
        return torch.where(mask, zero, torch.finfo(dtype).min)

    def logits(self, hidden_nD: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states, [n, V], as the model's own `forward` computes them."""
        assert self._output is not None, "call `hidden` first"
        ids = torch.zeros((1, len(hidden_nD)), dtype=torch.long, device=hidden_nD.device)
        with self._stubbed_trunk(self._output(last_hidden_state=hidden_nD.unsqueeze(0))):
            logits_nV: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits_nV

    def logprobs(
        self,
        hidden_ND: torch.Tensor,
        targets_N: torch.Tensor,
        temperatures_N: torch.Tensor,
        cuts_N3: torch.Tensor | None,
        chunk: int,
        entropy: Literal["none", "measured", "trained"],
        teacher_tops: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the logprobs of the targets, the entropies of their distributions, and the divergences from a
        teacher's, [N] each, in nats.

        With more than `chunk` positions, logits are computed for `chunk` of them at a time and again in the backward
        pass, so that the logits of all positions are never in memory at once.

        `cuts_N3`: top_k, top_p and min_p that each target was sampled under. `entropy`: "none" returns zeros,
        "measured" the entropies without a gradient, "trained" with one.

        `teacher_tops`: ids and logprobs of a teacher's most probable tokens, [N, K], NaN where it was not asked. The
        divergence is `reverse_kl` before top_k, top_p and min_p, and 0 where it was not asked, or without a teacher."""
        count = max(1, -(-len(hidden_ND) // chunk))  # a part of a row may have no trained token
        tops: Any = [None] * count
        if teacher_tops is not None:
            tops = zip(*(part.split(chunk) for part in teacher_tops), strict=True)
        pieces = zip(
            hidden_ND.split(chunk),
            targets_N.split(chunk),
            temperatures_N.split(chunk),
            [None] * count if cuts_N3 is None else cuts_N3.split(chunk),
            tops,
            strict=True,
        )
        if len(hidden_ND) <= chunk:
            return self._chunk_logprobs(*next(pieces), entropy)
        computed = [
            torch.utils.checkpoint.checkpoint(self._chunk_logprobs, *piece, entropy, use_reentrant=False)
            for piece in pieces
        ]
        logprobs_N, entropies_N, divergences_N = (torch.cat(part) for part in zip(*computed, strict=True))
        return logprobs_N, entropies_N, divergences_N

    def top_logprobs(
        self, hidden_ND: torch.Tensor, temperatures_N: torch.Tensor, count: int, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and logprobs of the `count` most probable tokens of each position, [N, count], in nats."""
        parts = [
            self._logits(*piece).log_softmax(-1).topk(count, dim=-1)
            for piece in zip(hidden_ND.split(chunk), temperatures_N.split(chunk), strict=True)
        ]
        return torch.cat([p.indices for p in parts]), torch.cat([p.values for p in parts])

    def _logits(self, hidden_nD: torch.Tensor, temperatures_n: torch.Tensor) -> torch.Tensor:
        """The logits at the sampling temperature, [n, V], in float32 at least: bfloat16 is too coarse for logprobs."""
        logits_nV = self.logits(hidden_nD)
        logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
        return logits_nV / temperatures_n.unsqueeze(1)

    def _chunk_logprobs(
        self,
        hidden_nD: torch.Tensor,
        targets_n: torch.Tensor,
        temperatures_n: torch.Tensor,
        cuts_n3: torch.Tensor | None,
        teacher_tops: tuple[torch.Tensor, torch.Tensor] | None,
        entropy: Literal["none", "measured", "trained"],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what `logprobs` returns, for one chunk of n positions."""
        logits_nV = self._logits(hidden_nD, temperatures_n)
        divergences_n = logits_nV.new_zeros(len(logits_nV))
        if teacher_tops is not None:
            ids_nK, teacher_nK = teacher_tops
            (rows_m,) = (~teacher_nK[:, 0].isnan()).nonzero(as_tuple=True)  # those that the teacher was asked about
            policy_mK = logits_nV[rows_m].log_softmax(-1).gather(1, ids_nK[rows_m])
            tail = ids_nK.shape[1] < logits_nV.shape[1]
            divergence_m = reverse_kl(policy_mK, teacher_nK[rows_m].to(policy_mK), tail=tail)
            divergences_n = divergences_n.index_put((rows_m,), divergence_m)
        if cuts_n3 is not None:
            logits_nV = restrict(logits_nV, targets_n, cuts_n3)
        all_logprobs_nV = torch.log_softmax(logits_nV, dim=-1)
        logprobs_n = all_logprobs_nV.gather(1, targets_n.unsqueeze(1)).squeeze(1)
        if entropy == "none":
            return logprobs_n, torch.zeros_like(logprobs_n), divergences_n
        entropy_logprobs_nV = all_logprobs_nV if entropy == "trained" else all_logprobs_nV.detach()
        if cuts_n3 is not None:
            # A cut token has p = 0 and adds 0 to the entropy, but exp(-inf) * -inf would be NaN.
            entropy_logprobs_nV = entropy_logprobs_nV.masked_fill(entropy_logprobs_nV == -torch.inf, 0.0)
        return logprobs_n, -(entropy_logprobs_nV.exp() * entropy_logprobs_nV).sum(-1), divergences_n

    @contextmanager
    def _stubbed_trunk(self, output: Any) -> Iterator[None]:
        """Let the model's own `forward` read `output` in place of what its trunk computes."""
        self._stub.output = output
        self._parent._modules[self._leaf] = self._stub
        try:
            yield
        finally:
            self._parent._modules[self._leaf] = self.trunk
            self._stub.output = None


def disable_randomness(model: torch.nn.Module) -> None:
    """Switch off dropout and router jitter: the sampler has neither, and the trainer must compute the same logprobs.

    The auxiliary loss of routers is switched off too; TRL would add it to the policy's loss."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("dropout" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)
