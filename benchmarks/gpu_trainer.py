"""The GPU proof's measurements of the trainer: speed, MFU and memory of one Qwen3 shape, and of TRL's trainer.

Run by `benchmarks.gpu`, in a process of its own for each size. Every result is written at once; results
of an earlier run are kept and not measured again."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu_models
from benchmarks.gpu_machine import Partial

PEAK_TFLOPS = {
    "B200": 2250.0, "H200": 989.4, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.4, "L40S": 362.0, "L4": 121.0,
    "A100": 312.0, "A10G": 70.0, "A10": 125.0, "RTX 4090": 165.2, "RTX 3090": 71.0,
}  # fmt: skip
"""Dense bfloat16 rates of the vendor's data sheets, by a part of the device's name; the first that fits counts."""
BATCHES = ("short", "shared_prefix", "multiturn")
_LEAST_ROWS = 1


def data_sheet_tflops(name: str) -> float | None:
    """The data sheet's rate of a device; `None` where it is not in the table."""
    return next((rate for part, rate in PEAK_TFLOPS.items() if part in name), None)


def measured_tflops(device: Any, tiny: bool) -> float:
    """TFLOP/s of one large matrix product in the training type."""
    import torch

    n = 256 if tiny else 8192
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in "ab")
    for _ in range(3):
        a @ b
    _wait(device)
    began = time.perf_counter()
    for _ in range(10):
        a @ b
    _wait(device)
    return 10 * 2 * n**3 / (time.perf_counter() - began) / 1e12


def _wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: Any) -> int:
    import resource

    import torch

    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _forget_peak(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def own_logprobs(engine: Any, examples: Sequence[Any]) -> list[Any]:
    """The examples as a sampler with the trainer's present weights would have recorded them."""
    import numpy as np
    import torch

    from trainer.batches.packing import padded

    out = []
    for example in examples:
        sequence = example.sequence
        with torch.no_grad():
            computed, _ = engine.model.logprobs(
                padded([sequence]), (1, sequence.trained_tokens), entropy=False
            )
        logprobs = np.full(len(sequence.ids), np.nan, np.float32)
        logprobs[sequence.loss_mask] = computed[0].float().cpu().numpy()
        out.append(dataclasses.replace(example, sequence=dataclasses.replace(sequence, logprobs=logprobs)))
    return out


def _timed(step: Callable[[], Any], device: Any, rounds: int) -> tuple[float, list[Any]]:
    """Median seconds of a step, after a warm-up step, and the steps' return values."""
    seconds, results = [], []
    for _ in range(rounds + 1):
        _wait(device)
        began = time.perf_counter()
        results.append(step())
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:]), results


def ours(engine: Any, state: Any, examples: list[Any], groups: list[int], rounds: int) -> dict[str, Any]:
    """Steps as the service takes them, with the checks of every step."""
    from trainer.batches.packing import micro_batches

    _forget_peak(engine.model.device)
    seconds, results = _timed(
        lambda: engine.step(state, examples, groups).metrics, engine.model.device, rounds
    )
    peak = _peak(engine.model.device)
    metrics = results[-1]
    sequences = [e.sequence for e in examples]
    packing = engine.passes.packing_of(examples, groups)
    passes = micro_batches(sequences, groups, engine.passes.budget.tokens, packing)
    largest = max(b.layout.ids_RL.numel() for b in passes)
    # Forward, and backward through activations only: the base model's weights take no gradient.
    flops = 4 * engine.passes.size * metrics["tokens_forward"] / seconds
    return {
        "seconds": seconds, "layout": packing, "passes": len(passes), "tokens_of_largest_pass": largest,
        "token_budget": engine.passes.budget.tokens, "trained_tokens": metrics["tokens"],
        "forward_tokens": metrics["tokens_forward"], "sequence_tokens": sum(len(s.ids) for s in sequences),
        "trained_tokens_per_s": metrics["tokens"] / seconds,
        "forward_tokens_per_s": metrics["tokens_forward"] / seconds,
        "model_tflops": flops / 1e12, "peak_bytes": peak,
        "loss": results[0]["loss"], "logprob_diff": results[0].get("on_policy_logprob_diff"),
    }  # fmt: skip


def theirs(engine: Any, state: Any, examples: list[Any], rounds: int, scratch: Path) -> dict[str, Any]:
    """TRL's GRPOTrainer on the same batch and model, in the largest of 8, 4, 2, 1 rows a pass that fits into memory."""
    import torch

    from benchmarks.trainer import trl_step
    from trainer.engine.budget import is_out_of_memory

    rows = 8
    while True:
        step = trl_step(engine, engine.config, examples, scratch, rows)

        def fresh(step: Any = step) -> float:
            engine.model.load_adapter(state.weights)
            return float(step()["loss"])

        _forget_peak(engine.model.device)
        try:
            seconds, losses = _timed(fresh, engine.model.device, rounds)
        except RuntimeError as error:
            if not is_out_of_memory(error) or rows == _LEAST_ROWS:
                raise
            reason = str(error).splitlines()[0]
        else:
            break
        finally:
            engine.model.load_adapter(state.weights)
            engine.model.peft.zero_grad(set_to_none=True)
        del step, fresh
        print(f"TRL: {rows} rows a pass: {reason}", flush=True)
        rows //= 2
        if engine.model.device.type == "cuda":
            torch.cuda.empty_cache()
    trained = sum(e.sequence.trained_tokens for e in examples)
    return {
        "seconds": seconds, "rows_a_pass": rows, "trained_tokens_per_s": trained / seconds,
        "peak_bytes": _peak(engine.model.device), "loss": losses[0],
    }  # fmt: skip


def measure(
    size: str, into: Path, models: Path, scratch: Path, *, device: str, tiny: bool, rounds: int
) -> None:
    """All measurements of one model size."""
    import math
    import os

    import msgspec
    import torch

    from benchmarks.trainer import make_batch
    from pipeline.config import LoraConfig, TrainerConfig
    from trainer.engine.engine import Engine

    out = Partial(into)
    began = time.perf_counter()
    base = gpu_models.make(size, models / f"qwen3-{size}", tiny=tiny, device=device)
    out.put("made_s", time.perf_counter() - began)
    threads = min(8, os.cpu_count() or 1) if device == "cuda" else 1
    config = TrainerConfig(threads=threads, lora=LoraConfig(rank=16, alpha=32.0))
    began = time.perf_counter()
    engine = Engine(base, config, scratch)
    # The recorded logprobs are the model's own, in a layout that may differ from the one trained: the check runs and is
    # reported, and does not end the measurement.
    engine.configure(msgspec.structs.replace(config, logprob_bound=math.inf))
    out.put("load_and_verify_s", time.perf_counter() - began)
    verified = engine.passes.verified
    out.put(
        "verified",
        {
            "layout": verified.layout, "attention": verified.attention, "padded_max": verified.padded.largest,
            "padded_mean": verified.padded.mean,
            "packed_max": verified.packed.largest if verified.packed else None,
            "packed_mean": verified.packed.mean if verified.packed else None,
        },
    )  # fmt: skip
    out.put(
        "model",
        {
            "parameters": sum(p.numel() for p in engine.model.peft.get_base_model().parameters()),
            "dtype": str(engine.model.dtype).removeprefix("torch."), "lora_rank": config.lora.rank,
            "gradient_checkpointing": engine.model.checkpointing,
        },
    )  # fmt: skip
    if "matmul_tflops" not in out.found:
        out.put("matmul_tflops", measured_tflops(engine.model.device, tiny))
    state = engine.initial_state()
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    out.put("data_sheet_tflops", data_sheet_tflops(name))
    for batch in BATCHES:
        done = dict(out.found.get("batches", {}).get(batch, {}))
        if {"journeywork", "trl"} <= done.keys():
            continue
        groups_each = None if batch == "short" else 1 if tiny else 4
        examples, groups = make_batch(batch, groups=groups_each)
        if tiny:
            examples, groups = examples[:4], groups[:4]
        engine.model.load_adapter(state.weights)
        examples = own_logprobs(engine, examples)
        if "journeywork" not in done:
            found = ours(engine, state, examples, groups, rounds)
            found["mfu_of_matmul"] = found["model_tflops"] / out.found["matmul_tflops"]
            sheet = out.found["data_sheet_tflops"]
            found["mfu"] = found["model_tflops"] / sheet if sheet else None
            done["journeywork"] = found
            out.put("batches", {**out.found.get("batches", {}), batch: done})
        done["trl"] = theirs(engine, state, examples, rounds, scratch)
        done["loss_difference"] = abs(done["trl"]["loss"] - done["journeywork"]["loss"])
        done["speedup"] = done["trl"]["seconds"] / done["journeywork"]["seconds"]
        out.put("batches", {**out.found.get("batches", {}), batch: dict(done)})
