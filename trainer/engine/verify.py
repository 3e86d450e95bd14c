"""Checks, before the first step, that a training pass computes the model's own logprobs. `Passes` calls `verify` when a
model is loaded.

The reference is `model(...).logits` of one sequence at a time with eager attention, because faster kernels may leave
something out: SDPA ignores Gemma2's cap on attention scores, for example. The logprobs that a step would compute, in
padded rows and in a prefix tree, are compared with it. If they differ, the model is refused: training with a wrong
mask, position or head would raise no error.

A 16-bit model is compared in float32, where its rounding hides nothing: with a random adapter it moves logprobs of a
small model by 0.1 nats on average, more than many a wrong mask. Where memory does not hold that, or the weights are
quantised or divided, it is compared as it is.

The sequences are random tokens. They are longer than the sliding window, up to a limit that depends on the device.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from pipeline.config import ConfigError, TrainerConfig
from pipeline.telemetry.logs import get_logger
from trainer.batches.packing import Layout, padded, prefix_shared
from trainer.engine.fitting import is_out_of_memory
from trainer.engine.forward import attention_spans, mask_formats
from trainer.engine.images import ImageInputs
from trainer.engine.model import PolicyModel, shape_of
from trainer.engine.state import Weights
from trainer.sequences import TokenSequence

logger = get_logger("trainer.engine.verify")

_TAIL = 24
"""Number of positions compared, at the end of each sequence."""
_LONGEST = {"cpu": 1024, "cuda": 8192}
"""Length of the longest test sequence in tokens, by device type."""
_MODEL_ERRORS = (AttributeError, KeyError, TypeError, ValueError, RuntimeError, IndexError)
"""What the code of a model raises for masks or images that it does not take."""


@dataclass(frozen=True)
class Difference:
    """Absolute difference between the logprobs of a training pass and the model's own, in nats per token."""

    mean: float
    largest: float

    def within_bound(self, config: TrainerConfig, dtype: torch.dtype) -> bool:
        """Whether the difference is within `trainer.logprob_bound`: the largest one; in 16-bit types the mean.

        There, rounding can route a token to another expert, and its logprob then differs by whole nats."""
        exact = dtype in (torch.float32, torch.float64)
        return (self.largest if exact else self.mean) <= logprob_bound_for(config, dtype)

    def __str__(self) -> str:
        return f"{self.largest:.3g} nats (mean {self.mean:.3g})"


@dataclass(frozen=True)
class Verified:
    """The result of `verify`."""

    padded: Difference
    """In padded rows."""
    prefix_shared: Difference | None
    """With shared prefixes. `None` if no such pass could be run."""
    layout: Literal["prefix", "padded"]
    """`prefix`: both layouts give right logprobs; `padded`: only padded rows do."""
    attention: str
    """The attention implementation under which the logprobs were compared last."""
    why_padded: str = ""
    """Why prefixes can't be shared; empty if they can."""
    images: Difference | None = None
    """In padded rows with images. `None` for a model that is trained without images."""


class RefusedError(ConfigError):
    """The model can't be trained under the given settings."""

    def __init__(self, refusal: str, verified: Verified) -> None:
        """`verified`: what was compared until the refusal."""
        super().__init__(refusal)
        self.verified = verified


def logprob_bound_for(config: TrainerConfig, dtype: torch.dtype) -> float:
    """Return `trainer.logprob_bound` in nats, or its default for weights of type `dtype`."""
    if config.logprob_bound is not None:
        return config.logprob_bound
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.08


def random_sequences(vocabulary: int, longest: int, span: int) -> list[TokenSequence]:
    """Return random test sequences, which form one prefix tree. The longest have a few tokens more than `span`, the
    attention span of the model, and at most `longest`.

    They branch at several depths; two of them are equal, and one shares no prefix."""
    rng = np.random.default_rng(0)

    def random_ids(n: int) -> np.ndarray[Any, Any]:
        return rng.integers(0, vocabulary, n)

    length = min(max(48, span + _TAIL + 8), longest)
    root = random_ids(length - 24)
    first, second = random_ids(12), random_ids(12)
    branches = [
        np.concatenate([root, first, second]),
        np.concatenate([root, first, random_ids(9)]),
        np.concatenate([root, first, second]),
        np.concatenate([root, random_ids(7)]),
        np.concatenate([root[: len(root) // 2], random_ids(15)]),
        random_ids(13),
    ]
    return [TokenSequence.made_up("verify", ids, _TAIL) for ids in branches]


def image_sequences(images: ImageInputs, vocabulary: int) -> list[TokenSequence]:
    """Return test sequences with no, one and two images of different sizes, among random tokens."""
    rng = np.random.default_rng(1)
    files = [_random_image(rng, width, height) for width, height in ((56, 56), (84, 56))]
    text = np.delete(np.arange(vocabulary), images.token)
    out = []
    for images_of_sequence in ([files[0]], [], [files[1], files[0]]):
        parts = [rng.choice(text, 5)]
        for file in images_of_sequence:
            parts += [np.full(images.features(file), images.token), rng.choice(text, 4)]
        ids = np.concatenate([*parts, rng.choice(text, _TAIL)])
        out.append(replace(TokenSequence.made_up("verify", ids, _TAIL), images=tuple(images_of_sequence)))
    return out


def _random_image(rng: np.random.Generator, width: int, height: int) -> bytes:
    """Return a PNG file of random pixels."""
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


@contextmanager
def _own_forward(model: PolicyModel) -> Iterator[None]:
    """Let the model compute as its own class does within the block: in inference mode, with eager attention. Unsloth's
    attention can't be changed."""
    inner, before = model.peft.get_base_model(), model.forward.attention
    changes = model.config.engine != "unsloth"
    model.peft.eval()
    if changes:
        inner.set_attn_implementation("eager")
    try:
        yield
    finally:
        if changes:
            inner.set_attn_implementation(before)
        model.peft.train()


def _reference_logprobs(model: PolicyModel, samples: Sequence[TokenSequence]) -> list[torch.Tensor]:
    """Return the logprobs of each sequence's trained tokens as the model's own forward pass computes them."""
    out = []
    with _own_forward(model), torch.no_grad(), model.forward.one_pass():
        for s in samples:
            ids_1L = torch.from_numpy(s.ids.astype(np.int64))[None].to(model.device)
            keep = s.trained_tokens + 1
            inputs = model.images.inputs(ids_1L, [s.images]) if s.images and model.images else {}
            logits_LV = model.peft(input_ids=ids_1L, use_cache=False, logits_to_keep=keep, **inputs).logits[0]
            logits_LV = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32))
            logprobs_LV = torch.log_softmax(logits_LV[-keep:-1], -1)
            out.append(logprobs_LV.gather(1, ids_1L[0, -keep + 1 :, None]).squeeze(1).cpu())
    return out


def _difference(
    model: PolicyModel, layout: Layout, samples: Sequence[TokenSequence], reference: Sequence[torch.Tensor]
) -> Difference:
    """Compare the logprobs of a training pass over `layout` with the reference. A NaN counts as infinite."""
    shape = shape_of(samples)
    with torch.no_grad(), model.forward.one_pass():
        logprobs_SK = model.logprobs(layout, shape, entropy=False)[0]
    differences = [(row[: len(ref)].cpu() - ref).abs() for row, ref in zip(logprobs_SK, reference, strict=True)]
    all_N = torch.cat(differences).nan_to_num(nan=float("inf"))
    return Difference(float(all_N.mean()), float(all_N.max()))


def _random_adapter(model: PolicyModel) -> Weights:
    """Return weights of an adapter that changes the output of every layer which has one by about a third."""
    generator = torch.Generator().manual_seed(0)
    # PEFT draws A with a variance of 1 / (3 * inputs), so `B @ A` gets the variance of a layer's weights from this.
    std = 0.3 * (3 / model.lora.r) ** 0.5 * model.lora.r / model.lora.lora_alpha
    return {
        name: torch.randn(weight.shape, generator=generator) * std if "lora_B" in name else weight
        for name, weight in model.weights().items()
    }


def verify(model: PolicyModel) -> Verified:
    """Find out in which layouts, and with which attention implementation, `model` computes its own logprobs.

    The comparison is made with a random adapter: a fresh one changes nothing, so a training pass that bypasses it would
    not show. Sets the attention implementation and the mask format that were found right on `model.forward`. Raises
    `RefusedError` if no layout gives the model's logprobs, or if the layout that is set does not."""
    with model.with_adapter(_random_adapter(model)), _in_float32(model):
        samples = _samples_for(model)
        reference = _reference_logprobs(model, samples)
        padded_difference = _verify_padded(model, samples, reference)
        shared_difference, why = _verify_prefix_sharing(model, samples, reference)
        if why and model.config.memory.packing == "prefix":
            raise RefusedError(
                f"trainer.memory.packing: prefixes can't be shared with {model.base} "
                f"({type(model.forward.model).__name__}): {why}; use `padded` or `auto`",
                Verified(padded_difference, shared_difference, "padded", model.forward.attention, why),
            )
        if why:
            logger.info("prefixes can't be shared: every sequence gets its own row", model=model.base, why=why)
        images = None if model.images is None else _verify_images(model, model.images)
    layout: Literal["prefix", "padded"] = "padded" if why else "prefix"
    return Verified(padded_difference, shared_difference, layout, model.forward.attention, why, images)


@contextmanager
def _in_float32(model: PolicyModel) -> Iterator[None]:
    """Hold the frozen weights of a 16-bit model in float32 within the block, unless Unsloth loaded them, or they are
    quantised, divided among processes, or too large for the memory."""
    config = model.config
    plain = config.engine == "transformers" and config.memory.quantization == "none" and not model.sharded
    frozen = [*model.peft.parameters(), *model.peft.buffers()] if plain else []
    before = [(t, t.dtype) for t in frozen if t.dtype in (torch.bfloat16, torch.float16)]

    def restore() -> None:  # loses nothing: they had these values
        for tensor, dtype in before:
            tensor.data = tensor.data.to(dtype)

    try:
        for tensor, _ in before:
            tensor.data = tensor.data.float()
    except RuntimeError as error:
        restore()
        if not is_out_of_memory(error):
            raise
    try:
        yield
    finally:
        restore()


def _samples_for(model: PolicyModel) -> list[TokenSequence]:
    """Return test sequences beyond the model's windows. They have at most the tokens of one pass, so that the check
    fits into memory if training does."""
    config, text = model.config, model.forward.text
    spans = attention_spans(text) or {}
    span = max((r.window or r.chunk for r in spans.values()), default=0)
    positions = getattr(text, "max_position_embeddings", None) or 1 << 20
    at_most = (_LONGEST.get(model.device.type, 1024), config.memory.tokens_per_batch, model.longest or positions)
    return random_sequences(model.vocabulary, max(32, min(*at_most, positions)), span)


def _verify_padded(
    model: PolicyModel, samples: Sequence[TokenSequence], reference: Sequence[torch.Tensor]
) -> Difference:
    """Return the difference of padded rows from the reference. If it is too large with the model's fast attention,
    eager attention is set, which computes all that a model asks for, and compared. Unsloth's attention can't be
    changed. Raises `RefusedError` if the difference stays too large."""
    config, forward = model.config, model.forward
    difference = _difference(model, padded(samples), samples, reference)
    if not difference.within_bound(config, forward.trunk.dtype) and config.engine != "unsloth":
        logger.warning(
            "SDPA gives other logprobs than this model's own attention; eager attention is used instead",
            model=model.base,
            difference=str(difference),
        )
        forward.model.set_attn_implementation("eager")
        difference = _difference(model, padded(samples), samples, reference)
    if not difference.within_bound(config, forward.trunk.dtype):
        raise RefusedError(
            f"{model.base} ({type(forward.model).__name__}) can't be trained: the logprobs of a training pass differ "
            f"from the model's own by {difference}; trainer.logprob_bound is "
            f"{logprob_bound_for(config, forward.trunk.dtype):g}",
            Verified(difference, None, "padded", forward.attention),
        )
    return difference


def _verify_images(model: PolicyModel, images: ImageInputs) -> Difference | None:
    """Return the difference of padded rows with images from the reference; `None` if none could be computed. If rows
    with images are wrong, the model is trained without images from now on, which is logged."""
    try:
        samples = image_sequences(images, model.vocabulary)
        reference = _reference_logprobs(model, samples)
        difference = _difference(model, padded(samples), samples, reference)
        right = difference.within_bound(model.config, model.forward.trunk.dtype)
        why = "" if right else f"its logprobs differ by {difference}"
    except torch.OutOfMemoryError:
        raise
    except _MODEL_ERRORS as error:
        difference, why = None, f"{type(error).__name__}: {error}"[:300]
    if why:
        logger.warning("runs with images are not trained", model=model.base, why=why)
        model.images = model.forward.images = None
    return difference


def _verify_prefix_sharing(
    model: PolicyModel, samples: Sequence[TokenSequence], reference: Sequence[torch.Tensor]
) -> tuple[Difference | None, str]:
    """Try the model's mask formats on a prefix tree, and set the first that gives right logprobs.

    Returns its difference from the reference and an empty string. If no format is right, returns the last difference,
    or `None` if no pass ran, and the reason why prefixes can't be shared."""
    if not model.accepts_masks:
        return None, "the engine replaces the attention mask"
    difference: Difference | None = None
    before = model.forward.mask_format
    why = "some of its layers carry a state from token to token"
    layout = prefix_shared(samples, [0] * len(samples))
    for mask_format in mask_formats(model.forward.text):
        model.forward.mask_format = mask_format
        try:
            difference = _difference(model, layout, samples, reference)
        except torch.OutOfMemoryError:
            raise
        except _MODEL_ERRORS as error:
            why = f"it does not accept the attention mask of a prefix tree ({type(error).__name__}: {error})"[:300]
            continue
        if difference.within_bound(model.config, model.forward.trunk.dtype):
            return difference, ""
        why = f"the logprobs with shared prefixes differ from the model's own by {difference}"
    model.forward.mask_format = before
    return difference, why
