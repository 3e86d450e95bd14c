"""Estimates memory and time of training on one GPU from a stated model; nothing is run.

    python -m benchmarks.gpu_hour          # the tables of docs/gpu-in-an-hour.md

Every number of the model is a field below. The estimate is meant to be right within a factor of two: it says which
model fits and what an hour holds, not which setting is faster.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class Shape:
    """A dense transformer with grouped-query attention, as in its config.json."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    @property
    def parameters(self) -> float:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied else 2)

    def adapter(self, rank: int) -> float:
        """Parameters of a LoRA adapter on all linear layers."""
        query, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ends = 2 * (self.hidden + query) + 2 * (self.hidden + keys) + 3 * (self.hidden + self.intermediate)
        return self.layers * rank * ends

    @property
    def cache_bytes(self) -> float:
        """Bytes of the KV cache for a token, in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


SHAPES = (
    Shape("Qwen3-4B", 36, 2560, 9728, 32, 8, 128, 151_936, tied=True),
    Shape("Qwen3-8B", 36, 4096, 12_288, 32, 8, 128, 151_936, tied=False),
)


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet."""

    name: str
    memory: float
    """Bytes."""
    flops: float
    """Dense bfloat16 operations a second."""
    bandwidth: float
    """Bytes a second."""


GPUS = (
    Gpu("RTX 4090, 24 GB", 24 * GB, 165e12, 1.01e12),
    Gpu("A100, 80 GB", 80 * GB, 312e12, 2.0e12),
    Gpu("H100, 80 GB", 80 * GB, 989e12, 3.35e12),
)


@dataclass(frozen=True)
class Work:
    """A step, and how well the GPU is used."""

    groups: int = 8
    attempts: int = 8
    prompt: int = 500
    """Tokens of a run that the model did not sample."""
    sampled: int = 600
    rank: int = 16
    share: float = 0.45
    """Share of the GPU's memory for each of vLLM and the trainer, as `journeywork up` sets it."""
    runtime: float = 3 * GB
    """CUDA context, workspaces and the activations of a vLLM batch, for each of the two."""
    compute_share: float = 0.35
    """Share of the data sheet's operations that training reaches."""
    bandwidth_share: float = 0.5
    """Share of the data sheet's bandwidth that decoding reaches, with adapters."""
    checkpointed: float = 2.0
    """Bytes kept for each hidden value of a token and layer, with gradient checkpointing."""
    logits: float = 6.0
    """Bytes for each logit of a token that is trained, over a pass of `pass_tokens`."""
    pass_tokens: int = 4096
    commit_s: float = 3.0
    """Checkpoint, upload, loading and probing."""
    setup_s: float = 600.0
    """Loading and compiling, and the evaluations before and after."""


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds."""

    serving: float
    training: float
    cache_tokens: float
    sample_s: float
    train_s: float
    steps: int
    fits: bool


def estimate(shape: Shape, gpu: Gpu, work: Work | None = None) -> Estimate:
    """Return what a step and an hour take. Sampling and training share the GPU, so their times are added."""
    work = work or Work()
    weights, runs = 2 * shape.parameters, work.groups * work.attempts
    cache = work.share * gpu.memory - weights - work.runtime
    # float32 adapter, gradient and two moments; hidden states; one layer recomputed; logits of a pass.
    adapter = 16 * shape.adapter(work.rank)
    hidden = work.checkpointed * shape.hidden * shape.layers * work.pass_tokens
    layer = 2 * (16 * shape.hidden + 5 * shape.intermediate) * work.pass_tokens
    training = weights + adapter + hidden + layer + work.logits * shape.vocabulary * 1024 + work.runtime
    tokens = work.prompt + work.sampled
    at_once = min(runs, max(cache, 0) / (shape.cache_bytes * tokens))
    mean_context = work.prompt + work.sampled / 2
    read = weights + at_once * mean_context * shape.cache_bytes
    rate = at_once * gpu.bandwidth * work.bandwidth_share / read if at_once else 0.0
    sample_s = runs * work.sampled / rate if rate else float("inf")
    # Forward, recomputation, and the gradient of the activations: 2 operations a parameter each.
    train_s = 6 * shape.parameters * runs * tokens / (gpu.flops * work.compute_share)
    fits = cache > 8 * shape.cache_bytes * tokens and training < work.share * gpu.memory
    step_s = sample_s + train_s + work.commit_s
    steps = int((3600 - work.setup_s) / step_s) if fits else 0
    return Estimate(
        weights + work.runtime, training, max(cache, 0) / shape.cache_bytes, sample_s, train_s, steps, fits
    )


def tables() -> str:
    """Return the page's tables in Markdown."""
    lines = [
        "| model | GPU | vLLM without cache | trainer | KV cache, tokens | fits |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    found = [(shape, gpu, estimate(shape, gpu)) for shape in SHAPES for gpu in GPUS]
    for shape, gpu, e in found:
        fits = "yes" if e.fits else "no"
        lines.append(
            f"| {shape.name} | {gpu.name} | {e.serving / GB:.1f} GB | {e.training / GB:.1f} GB | {e.cache_tokens:,.0f} "
            f"| {fits} |"
        )
    lines += [
        "",
        "| model | GPU | sampling | training | a step | steps in an hour |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for shape, gpu, e in found:
        if e.fits:
            step = e.sample_s + e.train_s + Work().commit_s
            lines.append(
                f"| {shape.name} | {gpu.name} | {e.sample_s:.0f} s | {e.train_s:.0f} s | {step:.0f} s | {e.steps} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(tables())
