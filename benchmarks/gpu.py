"""Speed and memory of a training step on a GPU, beside TRL's trainer on the same batches.

    make gpu-proof                                    tests/gpu and this program, in eight minutes at the most
    python -m benchmarks.gpu --only 0.6b 4b
    python -m benchmarks.gpu --device cpu --tiny --out gpu-tiny.json      the same code on toy sizes; proves nothing

The models have the shapes of Qwen3-0.6B, -4B and -8B and random weights: nothing is downloaded. Results go to
benchmarks/results/gpu.json, after each batch. A batch that fails costs its own figures only; with --seconds, batches
that would begin later are left out. Exits with 1 if anything failed, and with 2 if the device does not exist."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from pipeline.config import LoraConfig, OptimizerConfig, TrainerConfig

ROOT = Path(__file__).parents[1]


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    """Return the configuration of a Qwen3 of these sizes. `tied`: whether input and output embeddings are one
    weight."""
    return {
        "vocab_size": 151_936,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


SHAPES = {
    "0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "8b": _qwen3(4096, 12_288, 36, 32, tied=False),
}
"""The published configurations of Qwen3-0.6B, -4B and -8B."""
_TINY = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
_LONGEST = 32_768
BATCHES = ("short", "shared_prefix", "multiturn")


def make_model(size: str, folder: Path, *, tiny: bool, device: str) -> str:
    """Write a model of shape `size` with random weights; return its folder."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape = SHAPES[size] | (_TINY if tiny else {})
    config = Qwen3Config(**shape, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    # Logits with a standard deviation of about 3, as in trained models; else all logprobs would be nearly equal.
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=3 / config.hidden_size**0.5)
    # Random signs of the last norm: with tied embeddings, a token would predict itself with certainty.
    torch.nn.init.normal_(model.model.norm.weight)
    model.save_pretrained(folder)
    return str(folder)


def own_logprobs(engine: Any, examples: Sequence[Any]) -> list[Any]:
    """Return the examples with the logprobs of the live model, as if it had sampled them."""
    from trainer.batches.packing import padded

    out = []
    for example in examples:
        sequence = example.sequence
        with torch.no_grad():
            computed = engine.model.logprobs(padded([sequence]), (1, sequence.trained_tokens), entropy=False)[0]
        logprobs = np.full(len(sequence.ids), np.nan, np.float32)
        logprobs[sequence.loss_mask] = computed[0].float().cpu().numpy()
        out.append(dataclasses.replace(example, sequence=dataclasses.replace(sequence, logprobs=logprobs)))
    return out


def _timed(step: Callable[[], Any], device: torch.device, rounds: int) -> dict[str, Any]:
    """Return the median seconds of a step after a warm-up step, its peak of GPU memory, and its last result."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    seconds, result = [], None
    for _ in range(rounds + 1):
        began = time.perf_counter()
        result = step()
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated(device) if cuda else None
    return {"seconds": statistics.median(seconds[1:]), "peak_bytes": peak, "result": result}


def _journeywork(engine: Any, state: Any, examples: list[Any], group_of: list[int], rounds: int) -> dict[str, Any]:
    """Measure our step on a batch: median seconds, peak memory, loss, and trained tokens and TFLOP per second."""
    engine.model.load_adapter(state.weights)
    recorded = own_logprobs(engine, examples)
    timed = _timed(lambda: engine.step(state, recorded, group_of).metrics, engine.model.device, rounds)
    metrics = timed.pop("result")
    return timed | {
        "loss": metrics["loss"],
        "trained_tokens_per_s": metrics["tokens"] / timed["seconds"],
        "model_tflops": engine.passes.cost.per_token * metrics["tokens_forward"] / timed["seconds"] / 1e12,
    }


def _trl(engine: Any, state: Any, examples: list[Any], rounds: int, scratch: Path) -> dict[str, Any]:
    """Measure TRL's GRPOTrainer on the same batch, in the largest of 8, 4, 2, 1 rows a pass that fits into memory."""
    from benchmarks.trainer import trl_step

    engine.model.load_adapter(state.weights)
    recorded = own_logprobs(engine, examples)
    for rows in (8, 4, 2, 1):
        engine.model.load_adapter(state.weights)  # each of TRL's steps starts from it
        step = trl_step(engine, engine.config, recorded, scratch, rows)
        try:
            timed = _timed(step, engine.model.device, rounds)
            return {"rows_a_pass": rows, "loss": timed.pop("result")["loss"], **timed}
        except torch.OutOfMemoryError:
            engine.model.peft.zero_grad(set_to_none=True)
    return {"why": "a single row does not fit into memory"}


def measure(
    size: str, scratch: Path, out: dict[str, Any], part: Callable[..., None], *, device: str, tiny: bool, rounds: int
) -> None:
    """Measure the trainer on a shape: how far its logprobs are from the model's own (`trainer.engine.verify`, which
    `Engine` runs as it loads the model), and our step and TRL's over each batch of `benchmarks.trainer`.

    Writes into `out`. `part(into, name, measurement)` calls the measurement and puts what it returns into
    `into[name]`."""
    from benchmarks.trainer import make_batch
    from trainer.engine.engine import Engine

    base = make_model(size, scratch / size, tiny=tiny, device=device)
    config = TrainerConfig(
        threads=1 if device == "cpu" else min(8, os.cpu_count() or 1),
        lora=LoraConfig(rank=16, alpha=32.0),
        optimizer=OptimizerConfig(learning_rate=1e-5),
    )
    engine = Engine(base, config)
    # `own_logprobs` computes the recorded logprobs in padded passes, one sequence each; the steps may pack sequences.
    # Without a bound, a difference between the two is reported and does not end the measurement.
    engine.configure(msgspec.structs.replace(config, logprob_bound=math.inf))
    state = engine.initial_state()
    out |= {
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "layout": engine.passes.verified.layout,
        "logprob_difference": engine.passes.verified.padded.mean,  # nats per token, in padded rows
        "token_budget": engine.passes.budget.tokens,
        "batches": {},
    }

    for name in BATCHES:
        row = out["batches"][name] = {}
        examples, group_of = make_batch(name, groups=1 if tiny else None)
        if tiny:
            examples, group_of = examples[:4], group_of[:4]
        part(row, "journeywork", partial(_journeywork, engine, state, examples, group_of, rounds))
        part(row, "trl", partial(_trl, engine, state, examples, rounds, scratch))
    part(out, "longest", partial(_longest, engine, state, 512 if tiny else _LONGEST))


def _longest(engine: Any, state: Any, tokens: int) -> dict[str, Any]:
    """Measure a step over one sequence of `tokens` tokens, of which the second half is trained."""
    from trainer.batches.examples import Example
    from trainer.sequences import TokenSequence

    ids = np.random.default_rng(0).integers(2, engine.model.vocabulary, tokens)
    sequence = TokenSequence.made_up("t", ids, tokens // 2)
    engine.model.load_adapter(state.weights)
    examples = own_logprobs(engine, [Example(sequence, 1.0)])
    measured = _timed(lambda: engine.step(state, examples, [0]).metrics, engine.model.device, rounds=1)
    return {"tokens": tokens, "loss": measured.pop("result")["loss"], **measured}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES), help="sizes to measure")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each measurement")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the command itself")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no batch after so many")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json")
    args = parser.parse_args(argv)
    if args.tiny and args.out == parser.get_default("out"):
        parser.error("--tiny needs --out: its figures must not replace the measured ones")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("gpu-proof: no CUDA GPU: torch.cuda.is_available() is false\n")
        raise SystemExit(2)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    report: dict[str, Any] = {"device": name, "torch": torch.__version__, "tiny": args.tiny, "sizes": {}}
    began, failed = time.monotonic(), False

    def part(into: dict[str, Any], name: str, measurement: Callable[[], Any]) -> None:
        """Put the result of a measurement, or why it failed, into `into[name]`, and write the report. Does nothing if
        the time is over."""
        nonlocal failed
        if time.monotonic() - began >= args.seconds:
            print(f"{name}: left out, no time", flush=True)
            return
        try:
            into[name] = measurement()
        except RuntimeError as error:  # a full memory too
            into[name], failed = {"failed": str(error)}, True
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{name}: {'failed' if 'failed' in into[name] else 'done'}", flush=True)

    def all_of(size: str) -> dict[str, Any]:
        """Make all measurements of a size. They are in the report as they end, and are returned too."""
        out = report["sizes"][size] = {}
        with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
            measure(size, Path(folder), out, part, device=args.device, tiny=args.tiny, rounds=args.rounds)
        return out

    for size in args.only:
        part(report["sizes"], size, partial(all_of, size))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
