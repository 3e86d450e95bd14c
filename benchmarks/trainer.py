"""Trained tokens per second: Journeywork's trainer against TRL's padded GRPOTrainer, same tokens, same loss.

    python benchmarks/trainer.py [--threads 1] [--rounds 3] [--out benchmarks/results/trainer.json]

Three shapes of work, each in a process of its own per implementation so that the peak memory is its own:

| shape | a step |
| --- | --- |
| short | 8 groups of 8 single-turn replies: prompts of 40-80 tokens, replies of 8-32 |
| shared_prefix | one group of 8: a 2,000-token prompt, 200-token replies |
| multiturn | one group of 8 tool agents: 200-token prompt, 10 turns of 20-60 reply tokens and 30-90 tool tokens |

TRL's side gets the same merged sequences (one row per trajectory, tool tokens masked), computes logits for
completions only, and is spared the extra forward pass with which TRL otherwise gets its old logprobs. Its fused LM
head is a GPU kernel, so logits are plain on CPU. Losses of both sides are compared. A step is forward, loss, backward
and optimizer; ours also makes the checks of every step that users get (`checks_share` is their part of its CPU time).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES = ("short", "shared_prefix", "multiturn")
IMPLEMENTATIONS = ("trl", "journeywork", "journeywork_unchecked")
"""`journeywork` takes steps as the service does, with the checks against the sampler's logprobs and the base model.
`journeywork_unchecked` leaves the checks out, to measure their cost."""
SMALL_PASSES = "journeywork_small_passes"
"""`journeywork` with passes as large as TRL's 8 padded rows of the short shape, to compare memory at equal size."""
VOCAB = 4096


def model_folder(folder: Path) -> str:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def make_batch(shape: str, groups: int | None = None) -> tuple[list[Any], list[int]]:
    """Examples and the group of each; `groups` overrides the shape's number of groups."""
    import numpy as np

    from trainer.batches.groups import Example
    from trainer.batches.sequences import TokenSequence

    rng = np.random.default_rng(0)

    def some(low: int, high: int) -> list[int]:
        return rng.integers(2, VOCAB, int(rng.integers(low, high + 1))).tolist()

    examples, group_of = [], []
    for group in range(groups or (8 if shape == "short" else 1)):
        prompt = {"short": (40, 80), "shared_prefix": (2000, 2000), "multiturn": (200, 200)}[shape]
        shared = some(*prompt)
        for _ in range(8):
            ids, trained = list(shared), [False] * len(shared)
            turns = 10 if shape == "multiturn" else 1
            for turn in range(turns):
                reply = some(*{"short": (8, 32), "shared_prefix": (200, 200), "multiturn": (20, 60)}[shape])
                ids += reply
                trained += [True] * len(reply)
                if turn < turns - 1:
                    tool = some(30, 90)
                    ids += tool
                    trained += [False] * len(tool)
            n = len(ids)
            mask = np.array(trained)
            logprobs = np.where(mask, -8.0 + 0.1 * rng.standard_normal(n), np.nan).astype(np.float32)
            steps = np.where(mask, 0, -1).astype(np.int32)
            sequence = TokenSequence(
                "t", np.array(ids, np.int32), mask, logprobs, steps, np.ones(n, np.float32)
            )
            examples.append(Example(sequence, float(rng.normal())))
            group_of.append(group)
    return examples, group_of


def run_one(shape: str, implementation: str, base: str, threads: int, rounds: int) -> dict[str, float]:
    import msgspec
    import torch

    from pipeline.config import OptimizerConfig, TrainerConfig, with_values
    from trainer.engine.engine import Engine

    examples, groups = make_batch(shape)
    # The recorded logprobs are invented: the checks take their time, and the bound lets them find nothing.
    config = TrainerConfig(
        threads=threads, logprob_bound=math.inf, optimizer=OptimizerConfig(learning_rate=1e-3)
    )
    if implementation == "journeywork_unchecked":
        config = msgspec.structs.replace(config, check_share=0.0)
    if implementation == SMALL_PASSES:
        config = with_values(config, {"memory.tokens_per_batch": 896})
    with tempfile.TemporaryDirectory() as scratch:
        engine = Engine(base, config, Path(scratch))
        state = engine.initial_state()
        padded = trl_step(engine, config, examples, Path(scratch)) if implementation == "trl" else None
        seconds, cpu_seconds, losses = [], [], []
        for _ in range(rounds + 1):
            began, cpu_began = time.perf_counter(), time.process_time()
            if padded is None:
                losses.append(engine.step(state, examples, groups).metrics["loss"])
            else:
                engine.load_adapter(state.weights)
                losses.append(padded())
            seconds.append(time.perf_counter() - began)
            cpu_seconds.append(time.process_time() - cpu_began)
    assert torch.get_num_threads() == threads
    trained = sum(e.sequence.trained_tokens for e in examples)
    return {
        "seconds": statistics.median(seconds[1:]),  # the first step warms up
        "cpu_seconds": statistics.median(cpu_seconds[1:]),  # other processes disturb it less
        "trained_tokens_per_s": trained / statistics.median(seconds[1:]),
        "trained_tokens": trained,
        "sequence_tokens": sum(len(e.sequence.ids) for e in examples),
        "loss": losses[0],
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def trl_step(engine: Any, config: Any, examples: list[Any], scratch: Path, rows_a_pass: int = 8) -> Any:
    """TRL's step over rows padded to the longest of a pass: prompts on the left, completions on the right. On a GPU
    the logprobs are computed by TRL's own code with its fused LM head."""
    import numpy as np
    import torch
    from datasets import Dataset

    from trainer.engine import losses as grpo

    on_gpu = engine.device.type == "cuda"

    class Padded(grpo.GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            self._batch = inputs
            return super()._compute_loss(model, inputs)

        def _get_per_token_logps_and_entropies(
            self,
            model: Any,
            input_ids: Any,
            attention_mask: Any,
            logits_to_keep: int,
            *_: Any,
            **options: Any,
        ) -> Any:
            if on_gpu:
                chosen, entropies, _unused = super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, **options
                )
            else:
                positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
                logits = model(
                    input_ids=input_ids, attention_mask=attention_mask, position_ids=positions,
                    logits_to_keep=logits_to_keep + 1, use_cache=False,
                ).logits[:, :-1]  # fmt: skip
                logprobs = torch.log_softmax(logits.float(), -1)
                with torch.no_grad():
                    entropies = -(logprobs.exp() * logprobs).sum(-1)
                chosen = logprobs.gather(-1, input_ids[:, -logits_to_keep:, None]).squeeze(-1)
            # With one optimizer step per batch the old logprobs are these: TRL's extra forward pass is spared.
            batch = self._batch
            mask = batch["completion_mask"] * batch["tool_mask"]
            batch["importance_sampling_ratio"] = grpo.importance_ratio(
                chosen, batch["sampled"], mask, config.loss.importance_sampling, config.loss.importance_clip
            )
            return chosen, entropies, None

    args = grpo.grpo_config(config, scratch, cpu=not on_gpu)
    trainer = Padded(
        model=engine.model, reward_funcs=[grpo._no_reward], args=args,
        train_dataset=Dataset.from_dict({"prompt": [""]}), processing_class=grpo._no_tokenizer(),
    )  # fmt: skip
    trainer.use_vllm = True  # turns the correction on
    trainer.current_gradient_accumulation_steps = 1
    engine.model.train()
    total = sum(e.sequence.trained_tokens for e in examples)

    def rows(part: list[Any]) -> dict[str, Any]:
        starts = [int(np.flatnonzero(e.sequence.loss_mask)[0]) for e in part]
        width = max(starts)
        length = max(len(e.sequence.ids) - s for e, s in zip(part, starts, strict=True))
        out = {
            name: torch.zeros(len(part), n, dtype=torch.long)
            for name, n in (("prompt_ids", width), ("prompt_mask", width), ("completion_ids", length),
                            ("completion_mask", length), ("tool_mask", length))
        }  # fmt: skip
        for i, (e, start) in enumerate(zip(part, starts, strict=True)):
            ids = torch.from_numpy(e.sequence.ids.astype(np.int64))
            n = len(ids) - start
            out["prompt_ids"][i, width - start :] = ids[:start]
            out["prompt_mask"][i, width - start :] = 1
            out["completion_ids"][i, :n] = ids[start:]
            out["completion_mask"][i, :n] = 1
            out["tool_mask"][i, :n] = torch.from_numpy(e.sequence.loss_mask[start:].astype(np.int64))
        out["sampled"] = torch.zeros(len(part), length)
        for i, (e, start) in enumerate(zip(part, starts, strict=True)):
            known = np.nan_to_num(e.sequence.logprobs[start:])
            out["sampled"][i, : len(known)] = torch.from_numpy(known)
        out["advantages"] = torch.tensor([e.advantage for e in part])
        out["num_items_in_batch"] = torch.tensor(float(total))
        return {name: tensor.to(engine.device) for name, tensor in out.items()}

    def step() -> float:
        optimizer = torch.optim.AdamW(engine.parameters, lr=config.optimizer.learning_rate, weight_decay=0.0)
        optimizer.zero_grad()
        loss_sum = 0.0
        for first in range(0, len(examples), rows_a_pass):
            loss = trainer.compute_loss(engine.model, rows(examples[first : first + rows_a_pass]))
            loss.backward()
            loss_sum += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(engine.parameters, config.optimizer.max_grad_norm)
        optimizer.step()
        return loss_sum

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--out", default="benchmarks/results/trainer.json")
    parser.add_argument("--one", nargs=3, metavar=("SHAPE", "IMPLEMENTATION", "MODEL"))
    args = parser.parse_args()
    if args.one:
        shape, implementation, base = args.one
        print(json.dumps(run_one(shape, implementation, base, args.threads, args.rounds)))
        return
    report: dict[str, Any] = {
        "command": f"python benchmarks/trainer.py --threads {args.threads} --rounds {args.rounds}",
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "load_before": os.getloadavg()[0]},
        "threads": args.threads,
        "speedup_in_cpu_time": {}, "checks_share": {},
        "trained_tokens_per_s": {}, "peak_rss_mb": {}, "seconds_per_step": {}, "loss": {}, "trained_tokens": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        base = model_folder(Path(folder))
        for shape in args.shapes:
            results = {}
            # -P: this file's folder must not be searched, it would be found in place of the package `trainer`.
            wanted = (*IMPLEMENTATIONS, SMALL_PASSES) if shape == "short" else IMPLEMENTATIONS
            for implementation in wanted:
                out = subprocess.run(
                    [sys.executable, "-P", __file__, "--threads", str(args.threads), "--rounds", str(args.rounds),
                     "--one", shape, implementation, base],
                    check=True, stdout=subprocess.PIPE, text=True,
                    env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
                )  # fmt: skip
                results[implementation] = json.loads(out.stdout.strip().splitlines()[-1])
            ours, theirs = results["journeywork"], results["trl"]
            unchecked = results["journeywork_unchecked"]
            if abs(ours["loss"] - theirs["loss"]) > 1e-4 * max(1.0, abs(theirs["loss"])):
                raise SystemExit(f"{shape}: the losses differ: {ours['loss']} and {theirs['loss']}")
            report[f"speedup_{shape}"] = round(
                ours["trained_tokens_per_s"] / theirs["trained_tokens_per_s"], 3
            )
            report["checks_share"][shape] = round(1 - unchecked["cpu_seconds"] / ours["cpu_seconds"], 3)
            for field in ("trained_tokens_per_s", "peak_rss_mb", "loss"):
                report[field][shape] = {i: round(results[i][field], 6) for i in wanted}
            report["speedup_in_cpu_time"][shape] = round(theirs["cpu_seconds"] / ours["cpu_seconds"], 3)
            report["seconds_per_step"][shape] = {i: round(results[i]["seconds"], 4) for i in wanted}
            report["trained_tokens"][shape] = ours["trained_tokens"]
            print(f"{shape:14} {report['seconds_per_step'][shape]}", file=sys.stderr)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
