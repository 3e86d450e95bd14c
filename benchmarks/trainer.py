"""Trained tokens per second: Journeywork's trainer against TRL's padded GRPOTrainer, same tokens, same loss.

    python -m benchmarks.trainer [--threads 1] [--rounds 10] [--shapes short] [--out benchmarks/results/trainer.json]
    python -m benchmarks.trainer --base runs/models/smollm2 --shapes short --out benchmarks/results/trainer_smollm2.json

Three shapes of work:

| shape | a step |
| --- | --- |
| short | 8 groups of 8 single-turn replies: prompts of 40-80 tokens, replies of 8-32 |
| shared_prefix | one group of 8: a 2,000-token prompt, 200-token replies |
| multiturn | one group of 8 tool agents: 200-token prompt, 10 turns of 20-60 reply tokens and 30-90 tool tokens |

A third side is the floor: torch's forward and backward of TRL's rows with a plain loss, and nothing else.

All take steps in turn, each in a process of its own, and their times over all rounds are compared: other work on
the machine disturbs all alike. A step is forward, loss, backward and optimizer. Ours runs under the default settings
as the service does, with its checks; half of the tokens are of the version before, as when rollouts and training
overlap. TRL's side gets the same merged sequences (one row per trajectory, tool tokens masked), computes logits for
completions only, and is spared the extra forward pass with which TRL otherwise gets its old logprobs. Its fused LM
head is a GPU kernel, so logits are plain on CPU. The losses of the first step are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPES = {
    "short": (8, (40, 80), 1, (8, 32)),
    "shared_prefix": (1, (2000, 2000), 1, (200, 200)),
    "multiturn": (1, (200, 200), 10, (20, 60)),
}
"""Groups, fewest and most tokens of a prompt, turns, fewest and most tokens of a reply."""
IMPLEMENTATIONS = ("trl", "torch", "journeywork")
VOCAB = 4096
_ROWS_A_PASS = 8
"""Rows of a pass of the other sides."""
_THEIR_ROUNDS = 5
"""The other sides take a step in every fifth round: their steps are alike, ours make their checks in some only."""
_WARM_UP = {"trl": 1, "torch": 1, "journeywork": 2}
"""First steps that are not counted. Ours then make the checks that are due at the start of a process."""


def make_model(folder: Path) -> str:
    """Write a Qwen3 of 4 million random parameters; return its folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def make_batch(shape: str, groups: int | None = None) -> tuple[list[Any], list[int]]:
    """Return random examples of a shape, and the group of each. `groups` overrides the shape's number of groups."""
    import numpy as np

    from trainer.batches.examples import Example
    from trainer.sequences import TokenSequence

    rng = np.random.default_rng(0)

    def random_ids(low: int, high: int) -> list[int]:
        return rng.integers(2, VOCAB, int(rng.integers(low, high + 1))).tolist()

    examples, group_of = [], []
    count, prompt, turns, reply = SHAPES[shape]
    for group in range(groups or count):
        shared = random_ids(*prompt)
        for _ in range(8):
            ids, trained = list(shared), [False] * len(shared)
            for turn in range(turns):
                reply_ids = random_ids(*reply)
                ids += reply_ids
                trained += [True] * len(reply_ids)
                if turn < turns - 1:
                    tool = random_ids(30, 90)
                    ids += tool
                    trained += [False] * len(tool)
            n = len(ids)
            mask = np.array(trained)
            logprobs = np.where(mask, -8.0 + 0.1 * rng.standard_normal(n), np.nan).astype(np.float32)
            steps = np.where(mask, 0, -1).astype(np.int32)
            sequence = TokenSequence("t", np.array(ids, np.int32), mask, logprobs, steps, np.ones(n, np.float32))
            examples.append(Example(sequence, float(rng.normal())))
            group_of.append(group)
    return examples, group_of


def journeywork_step(engine: Any, examples: list[Any], group_of: list[int]) -> Callable[[], dict[str, float]]:
    """Return a function that takes the next step of one run and returns its metrics. Every second sequence is of the
    version before the current one."""
    import dataclasses

    import numpy as np

    state = engine.initial_state()

    def step() -> dict[str, float]:
        nonlocal state
        batch = []
        for i, example in enumerate(examples):
            sampled_at = max(0, state.step - i % 2)
            steps = np.where(example.sequence.loss_mask, sampled_at, -1).astype(np.int32)
            batch.append(dataclasses.replace(example, sequence=dataclasses.replace(example.sequence, steps=steps)))
        result = engine.step(state, batch, group_of)
        state = result.state
        return dict(result.metrics)

    return step


def serve_steps(shape: str, implementation: str, base: str, threads: int) -> None:
    """Take a step for every line of standard input and print its measurements."""
    from pipeline.config import OptimizerConfig, TrainerConfig
    from trainer.engine.engine import Engine

    examples, group_of = make_batch(shape)
    # The recorded logprobs are invented: the checks take their time, and the bound lets them find nothing.
    config = TrainerConfig(threads=threads, logprob_bound=math.inf, optimizer=OptimizerConfig(learning_rate=1e-3))
    with tempfile.TemporaryDirectory() as scratch:
        engine = Engine(base, config)
        match implementation:
            case "journeywork":
                step = journeywork_step(engine, examples, group_of)
            case "trl":
                step = trl_step(engine, config, examples, Path(scratch))
            case _:
                step = torch_step(engine, examples)
        for _ in sys.stdin:
            began, cpu_began = time.perf_counter(), time.process_time()
            metrics = step()
            measured = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu_began}
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(json.dumps(metrics | measured | {"peak_rss_mb": peak}), flush=True)


def measure(shape: str, base: str, threads: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return the measurements of the steps of each implementation, which runs in a process of its own."""
    children = {
        # -P: this file's folder must not be searched, it would be found in place of the package `trainer`.
        name: subprocess.Popen(
            [sys.executable, "-P", __file__, "--threads", str(threads), "--serve", shape, name, base],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        )
        for name in IMPLEMENTATIONS
    }
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in children}
    for i in range(_WARM_UP["journeywork"] + rounds):
        for name, child in children.items():
            if name != "journeywork" and i % _THEIR_ROUNDS:
                continue
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("step\n")
            child.stdin.flush()
            steps[name].append(json.loads(child.stdout.readline()))
    for child in children.values():
        child.communicate()
    return steps


def padded_rows(part: list[Any], total: int) -> dict[str, Any]:
    """Return examples as TRL's tensors: prompts padded on the left, completions on the right. `total`: trained tokens
    of the whole step."""
    import numpy as np
    import torch

    starts = [int(np.flatnonzero(e.sequence.loss_mask)[0]) for e in part]
    width = max(starts)
    length = max(len(e.sequence.ids) - s for e, s in zip(part, starts, strict=True))
    widths = {"prompt_ids": width, "prompt_mask": width}
    widths |= dict.fromkeys(("completion_ids", "completion_mask", "tool_mask"), length)
    out = {name: torch.zeros(len(part), n, dtype=torch.long) for name, n in widths.items()}
    out["sampled"] = torch.zeros(len(part), length)
    for i, (e, start) in enumerate(zip(part, starts, strict=True)):
        ids = torch.from_numpy(e.sequence.ids.astype(np.int64))
        n = len(ids) - start
        out["prompt_ids"][i, width - start :] = ids[:start]
        out["prompt_mask"][i, width - start :] = 1
        out["completion_ids"][i, :n] = ids[start:]
        out["completion_mask"][i, :n] = 1
        out["tool_mask"][i, :n] = torch.from_numpy(e.sequence.loss_mask[start:].astype(np.int64))
        out["sampled"][i, :n] = torch.from_numpy(np.nan_to_num(e.sequence.logprobs[start:]))
    out["advantages"] = torch.tensor([e.advantage for e in part])
    out["num_items_in_batch"] = torch.tensor(float(total))
    return out


def trl_arguments(scratch: Path, **given: Any) -> Any:
    """Return TRL's arguments for steps over batches that are there already."""
    from trainer.trl_trainers import trl_imports

    with trl_imports():
        from trl import GRPOConfig
    return GRPOConfig(
        output_dir=str(scratch),
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=2,
        num_generations=2,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
        **given,
    )


def trl_needs() -> dict[str, Any]:
    """Return arguments that TRL's trainer requires and that steps over given batches do not use: rewards, a data set
    and a tokenizer."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return {
        "reward_funcs": [lambda **_: []],
        "train_dataset": Dataset.from_dict({"prompt": [""]}),
        "processing_class": PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<pad>"),
    }


def trl_step(engine: Any, config: Any, examples: list[Any], scratch: Path, rows_a_pass: int = _ROWS_A_PASS) -> Any:
    """Return a function that takes TRL's step from the fresh adapter and returns its loss. Rows are padded to the
    longest of a pass: prompts on the left, completions on the right. On a GPU the logprobs are computed by TRL's own
    code with its fused LM head."""
    import torch

    from trainer.engine.loss import importance_weights
    from trainer.trl_trainers import trl_imports

    with trl_imports():
        from trl import GRPOTrainer

    on_gpu = engine.model.device.type == "cuda"

    class Padded(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            self._batch = inputs
            return super()._compute_loss(model, inputs)

        def _get_per_token_logps_and_entropies(
            self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *_: Any, **options: Any
        ) -> Any:
            """Return the logprobs [B, T] of the last T = `logits_to_keep` tokens of `input_ids`, in nats, the entropies
            [B, T] of their distributions or, on a GPU, what TRL returns for them, and no load-balancing loss.

            Puts the importance ratios into the pass's inputs, where TRL's loss reads them."""
            if on_gpu:
                token_logprobs, entropies, _unused = super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, **options
                )
            else:
                positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
                logits = model(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    position_ids=positions,
                    logits_to_keep=logits_to_keep + 1,
                    use_cache=False,
                ).logits[:, :-1]
                logprobs = torch.log_softmax(logits.float(), -1)
                with torch.no_grad():
                    entropies = -(logprobs.exp() * logprobs).sum(-1)
                token_logprobs = logprobs.gather(-1, input_ids[:, -logits_to_keep:, None]).squeeze(-1)
            # With one optimizer step per batch the old logprobs are these: TRL's extra forward pass is spared.
            batch = self._batch
            mask = batch["completion_mask"] * batch["tool_mask"]
            batch["importance_sampling_ratio"] = importance_weights(
                token_logprobs, batch["sampled"], mask, config.loss.importance_sampling, config.loss.importance_clip
            )
            return token_logprobs, entropies, None

    loss = config.loss
    args = trl_arguments(
        scratch,
        use_cpu=not on_gpu,
        loss_type=loss.type,
        epsilon=loss.epsilon,
        vllm_importance_sampling_mode=loss.importance_sampling,
        vllm_importance_sampling_clip_max=loss.importance_clip,
    )
    trainer = Padded(model=engine.model.peft, args=args, **trl_needs())
    trainer.use_vllm = True  # turns the correction on
    trainer.current_gradient_accumulation_steps = 1
    engine.model.peft.train()
    total = sum(e.sequence.trained_tokens for e in examples)

    fresh = engine.model.weights()

    def step() -> dict[str, float]:
        """Take one step from the fresh adapter with a fresh optimizer. Returns the loss."""
        engine.model.load_adapter(fresh)
        optimizer = torch.optim.AdamW(engine.model.parameters, lr=config.optimizer.learning_rate, weight_decay=0.0)
        optimizer.zero_grad()
        loss_sum = 0.0
        for first in range(0, len(examples), rows_a_pass):
            rows = padded_rows(examples[first : first + rows_a_pass], total)
            tensors = {name: tensor.to(engine.model.device) for name, tensor in rows.items()}
            part = trainer.compute_loss(engine.model.peft, tensors)
            part.backward()
            loss_sum += float(part.detach())
        torch.nn.utils.clip_grad_norm_(engine.model.parameters, config.optimizer.max_grad_norm)
        optimizer.step()
        return {"loss": loss_sum}

    return step


def torch_step(engine: Any, examples: list[Any]) -> Callable[[], dict[str, float]]:
    """Return a function that makes the forward and backward passes of TRL's rows and nothing else. Its loss is the sum
    of the logprobs, weighted by the advantages."""
    import torch

    total = sum(e.sequence.trained_tokens for e in examples)
    engine.model.peft.train()

    def step() -> dict[str, float]:
        for first in range(0, len(examples), _ROWS_A_PASS):
            rows = padded_rows(examples[first : first + _ROWS_A_PASS], total)
            ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
            mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
            keep = rows["completion_ids"].shape[1]
            logits = engine.model.peft(
                input_ids=ids, attention_mask=mask, logits_to_keep=keep + 1, use_cache=False
            ).logits[:, :-1]
            losses = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), rows["completion_ids"].flatten(), reduction="none"
            ).view_as(rows["completion_ids"])
            weights = rows["tool_mask"] * rows["advantages"][:, None] / total
            (losses * weights).sum().backward()
        return {}

    return step


def compare(shape: str, steps: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the report of one shape. Exits if the first losses differ."""
    ours = steps["journeywork"]
    loss, trl_loss = ours[0]["loss"], steps["trl"][0]["loss"]
    if abs(loss - trl_loss) > 1e-4 * max(1.0, abs(trl_loss)):
        raise SystemExit(f"{shape}: the losses differ: {loss} and {trl_loss}")

    def mean(name: str, field: str) -> float:
        return statistics.fmean(step[field] for step in steps[name][_WARM_UP[name] :])

    trained = ours[0]["tokens"]
    return {
        "speedup": round(mean("trl", "seconds") / mean("journeywork", "seconds"), 3),
        "speed_against_torch": round(mean("torch", "seconds") / mean("journeywork", "seconds"), 3),
        "speedup_in_cpu_time": round(mean("trl", "cpu_seconds") / mean("journeywork", "cpu_seconds"), 3),
        "trained_tokens": trained,
        "trained_tokens_per_s": {n: round(trained / mean(n, "seconds"), 1) for n in steps},
        "checked_tokens_share": round(mean("journeywork", "tokens_checked") / mean("journeywork", "tokens_forward"), 4),
        "cpu_seconds_a_step": {n: round(mean(n, "cpu_seconds"), 3) for n in steps},
        "peak_rss_mb": {n: round(s[-1]["peak_rss_mb"]) for n, s in steps.items()},
        "loss": {n: round(s[0]["loss"], 6) for n, s in steps.items() if n != "torch"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10, help="4 or more, so that a step of TRL's is counted")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--base", type=Path, help="folder of a model; default: a random one of 4 million parameters")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/trainer.json")
    parser.add_argument("--serve", nargs=3, metavar=("SHAPE", "IMPLEMENTATION", "MODEL"))
    args = parser.parse_args()
    if args.serve:
        serve_steps(*args.serve, threads=args.threads)
        return
    from benchmarks.bench import RESULTS, machine, write_results  # not in the processes whose memory is measured

    report: dict[str, Any] = {"command": " ".join(["python -m benchmarks.trainer", *sys.argv[1:]]), **machine()}
    with tempfile.TemporaryDirectory() as folder:
        base = str(args.base.absolute()) if args.base else make_model(Path(folder))
        for shape in args.shapes:
            load = round(os.getloadavg()[0], 2)
            report[shape] = compare(shape, measure(shape, base, args.threads, args.rounds))
            report[shape]["load"] = [load, round(os.getloadavg()[0], 2)]
            print(f"{shape:14} {report[shape]}", file=sys.stderr)
    write_results(args.out or RESULTS / "trainer.json", report)


if __name__ == "__main__":
    main()
