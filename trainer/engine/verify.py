"""Verifies before the first step that a training pass gives the logprobs of the model's own forward pass.

The reference is `model(...).logits` of one sequence at a time, with eager attention, because faster kernels may
leave something out (SDPA ignores Gemma2's soft cap on attention scores, for example). It is compared with the
logprobs that a step would compute, of padded rows and of a prefix tree. If they differ, the model is refused: with a
wrong mask, position or head, training would run without an error and train the wrong function.

The sequences are random tokens. They reach beyond every sliding window of at most a few thousand tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from pipeline.config import ConfigError, TrainerConfig
from pipeline.telemetry.logs import get_logger
from trainer.batches.packing import Layout, padded, prefix_shared
from trainer.batches.sequences import TokenSequence
from trainer.engine.forward import reaches_of, ways_of
from trainer.engine.model import PolicyModel, shape_of

log = get_logger("trainer.engine.verify")

_TAIL = 24
"""Positions at the end of each sequence that are compared."""
_LONGEST = {"cpu": 1024, "cuda": 8192}
"""Tokens of the longest sequence that is tried, by device."""


@dataclass(frozen=True)
class Difference:
    """Absolute difference, in nats, of the logprobs of a training pass and the model's own."""

    mean: float
    largest: float

    def explained(self, config: TrainerConfig, dtype: torch.dtype) -> bool:
        """Whether rounding explains the difference. In bfloat16, single tokens differ by whole nats if rounding
        routes them to another expert, so the bound applies to the mean there."""
        exact = dtype in (torch.float32, torch.float64)
        return (self.largest if exact else self.mean) <= bound_of(config, dtype)

    def __str__(self) -> str:
        return f"{self.largest:.3g} nats (mean {self.mean:.3g})"


@dataclass(frozen=True)
class Verified:
    """The result of `verify`."""

    padded: Difference
    packed: Difference | None
    """`None` if prefixes can't be shared, or the settings forbid it."""
    layout: Literal["prefix", "padded"]
    """What `trainer.memory.packing` = `auto` may use; `prefix` allows both."""
    attention: str
    """The attention implementation that gave the right logprobs."""
    why_padded: str = ""
    """Why prefixes are not shared."""
    refused: str = ""
    """Why the model can't be trained under these settings; empty if it can."""


class RefusedError(ConfigError):
    """A model that can't be trained under the settings given."""

    def __init__(self, verified: Verified) -> None:
        super().__init__(verified.refused)
        self.verified = verified


def bound_of(config: TrainerConfig, dtype: torch.dtype) -> float:
    """`trainer.logprob_bound`, or its default for the type of the model's weights."""
    if config.logprob_bound is not None:
        return config.logprob_bound
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.08


def _sequence(ids: np.ndarray[Any, Any]) -> TokenSequence:
    n = len(ids)
    trained = np.zeros(n, np.bool_)
    trained[max(1, n - _TAIL) :] = True
    return TokenSequence(
        "verify", ids.astype(np.int32), trained, np.zeros(n, np.float32), np.zeros(n, np.int32), np.ones(n, np.float32)
    )  # fmt: skip


def sequences(vocabulary: int, longest: int, reach: int) -> list[TokenSequence]:
    """Test sequences: branches from a shared prefix at several depths, one that shares nothing, and two equal ones."""
    rng = np.random.default_rng(0)

    def some(n: int) -> np.ndarray[Any, Any]:
        return rng.integers(0, vocabulary, n)

    length = min(max(48, reach + _TAIL + 8), longest)
    root = some(length - 24)
    first, second = some(12), some(12)
    branches = [
        np.concatenate([root, first, second]),
        np.concatenate([root, first, some(9)]),
        np.concatenate([root, first, second]),
        np.concatenate([root, some(7)]),
        np.concatenate([root[: len(root) // 2], some(15)]),
        some(13),
    ]
    return [_sequence(ids) for ids in branches]


@contextmanager
def _reference(model: PolicyModel, eager: bool) -> Iterator[None]:
    """The model in inference mode, with eager attention if the model supports it."""
    inner = model.model.get_base_model()
    kept = model.forward.attention
    model.model.eval()
    if eager:
        inner.set_attn_implementation("eager")
    try:
        yield
    finally:
        if eager:
            inner.set_attn_implementation(kept)
        model.model.train()


def _own(model: PolicyModel, chosen: Sequence[TokenSequence], eager: bool) -> list[torch.Tensor]:
    """Logprobs of each sequence's trained tokens by the model's own forward pass."""
    out = []
    with _reference(model, eager), torch.no_grad():
        for s in chosen:
            ids_1L = torch.from_numpy(s.ids.astype(np.int64))[None].to(model.device)
            keep = s.trained_tokens + 1
            logits_LV = model.model(input_ids=ids_1L, use_cache=False, logits_to_keep=keep).logits[0]
            logits_LV = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32))
            logprobs_LV = torch.log_softmax(logits_LV[-keep:-1], -1)
            out.append(logprobs_LV.gather(1, ids_1L[0, -keep + 1 :, None]).squeeze(1).cpu())
    return out


def _difference(
    model: PolicyModel, layout: Layout, chosen: Sequence[TokenSequence], own: Sequence[torch.Tensor]
) -> Difference:
    shape = shape_of(chosen)
    with torch.no_grad():
        logprobs_SK, _ = model.logprobs(layout, shape, entropy=False)
    found = [(row[: len(want)].cpu() - want).abs() for row, want in zip(logprobs_SK, own, strict=True)]
    all_N = torch.cat(found).nan_to_num(nan=float("inf"))
    return Difference(float(all_N.mean()), float(all_N.max()))


def verify(model: PolicyModel) -> Verified:
    """Find out how `model` can be trained. Leaves it with the attention implementation and the way of sharing
    prefixes that gave the right logprobs. Raises `RefusedError` if no layout, or not the one in the settings, gives
    them."""
    config, forward = model.config, model.forward
    reaches = reaches_of(forward.text) or {}
    reach = max((r.window or r.chunk for r in reaches.values()), default=0)
    positions = getattr(forward.text, "max_position_embeddings", None) or 1 << 20
    # Not beyond what one pass is to hold: the check must fit wherever training does.
    longest = max(32, min(_LONGEST.get(model.device.type, 1024), config.memory.tokens_per_batch, positions))
    chosen = sequences(model.vocabulary, longest, reach)
    name = type(forward.model).__name__
    patched = config.engine == "unsloth"
    own = _own(model, chosen, eager=not patched)
    rows = _difference(model, padded(chosen), chosen, own)
    if not rows.explained(config, model.dtype) and not patched and config.memory.attention == "sdpa":
        log.warning(
            "SDPA does not compute this model's attention: going on with eager attention",
            model=model.base, difference=str(rows),
        )  # fmt: skip
        forward.model.set_attn_implementation("eager")
        rows = _difference(model, padded(chosen), chosen, own)
    if not rows.explained(config, model.dtype):
        raise RefusedError(Verified(rows, None, "padded", forward.attention, refused=(
            f"{model.base} ({name}) can't be trained here: the logprobs of a training pass differ from the model's "
            f"own by {rows}; trainer.logprob_bound is {bound_of(config, model.dtype):g}"
        )))  # fmt: skip
    packed, why = None, "the engine replaces the attention mask"
    if model.accepts_masks:
        packed, why = _try_ways(model, chosen, own)
    if why and config.memory.packing == "prefix":
        raise RefusedError(Verified(rows, packed, "padded", forward.attention, why, refused=(
            f"trainer.memory.packing: prefixes can't be shared with {model.base} ({name}): {why}; use `padded` or "
            "`auto`"
        )))  # fmt: skip
    if why:
        log.info("prefixes are not shared: every sequence gets its own row", model=model.base, why=why)
    return Verified(rows, packed, "padded" if why else "prefix", forward.attention, why)


def _try_ways(
    model: PolicyModel, chosen: Sequence[TokenSequence], own: Sequence[torch.Tensor]
) -> tuple[Difference | None, str]:
    """The difference with the first way of sharing prefixes that is right, or with the last one and why it is wrong."""
    found: Difference | None = None
    why = "some of its layers carry a state from token to token"
    layout = prefix_shared(chosen, [0] * len(chosen))
    for way in ways_of(model.forward.text):
        model.forward.way = way
        try:
            found = _difference(model, layout, chosen, own)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
            why = f"it does not take a mask of ours ({type(error).__name__}: {error})"[:300]
            continue
        if found.explained(model.config, model.dtype):
            return found, ""
        why = f"its logprobs would differ from its own by {found}"
    model.forward.way = None
    return found, why
