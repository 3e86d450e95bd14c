"""How the settings of a first run decide whether a small language model learns: a grid over `make demo`'s task.

    python -m benchmarks.rates --rates 5e-5 2e-4 8e-4 --scaling none group --seeds 0 1 2

In one process, without log and server: the trainer's engine, and transformers to sample with the adapter merged into
the weights. Each cell begins with the same warm start and is sampled by the newest version. Writes
benchmarks/results/rates.json: for each cell and seed the share of solved training messages and the entropy by step, and
the share of solved held-out messages at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.common import packaged
from examples.common.running import fast_bfloat16
from examples.inbox.agent import MAX_TOKENS
from examples.inbox.demo import EXAMPLES, EXAMPLES_FROM
from examples.inbox.messages import Message, Split, message, right_fields
from pipeline.config import TrainerConfig
from trainer.batches.groups import Example
from trainer.batches.sequences import TokenSequence
from trainer.engine.engine import Engine
from trainer.engine.state import TrainState

OUT = Path(__file__).parent / "results" / "rates.json"


class Learner:
    """A model that samples and trains in this process."""

    def __init__(self, base: Path, rank: int) -> None:
        self.rank, self.dtype = rank, "bfloat16" if fast_bfloat16() else "float32"
        self.engine = Engine(str(base), self.config({}))
        self.fresh = self.engine.initial_state()
        self.tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
        self.end = self.tokenizer.eos_token_id
        self.sampler: Any = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, self.dtype))
        self.plain = {name: weight.clone() for name, weight in self.sampler.state_dict().items()}

    def config(self, settings: dict[str, Any]) -> TrainerConfig:
        """The trainer's settings: these, and what the grid does not vary."""
        fixed = {
            "dtype": self.dtype, "lora": {"rank": self.rank, "alpha": 2 * self.rank}, "check_share": 0.0,
            "logprob_bound": 1e9, "max_staleness": 0,
        }  # fmt: skip
        return msgspec.convert(fixed | settings, TrainerConfig)

    def load(self, state: TrainState) -> None:
        """Let the sampler be the policy of `state`."""
        merged = dict(self.plain)
        adapter = state.master or state.weights
        for name, low in adapter.items():
            if ".lora_A." in name:
                key = name.removeprefix("base_model.model.").replace(".lora_A", "")
                high = adapter[name.replace(".lora_A.", ".lora_B.")]
                merged[key] = (self.plain[key].float() + 2 * high.float() @ low.float()).to(self.plain[key])
        self.sampler.load_state_dict(merged)

    @torch.no_grad()
    def answers(
        self, messages: list[Message], count: int, temperature: float
    ) -> list[list[tuple[list[int], list[float]]]]:
        """Return `count` answers to each message: token ids and logprobs."""
        texts = [self.tokenizer.apply_chat_template(m.prompt, tokenize=False, add_generation_prompt=True) for m in messages]
        prompt = self.tokenizer(texts, return_tensors="pt", padding=True)
        out = self.sampler.generate(
            **prompt, max_new_tokens=MAX_TOKENS, do_sample=temperature > 0, temperature=temperature or None, top_k=0,
            top_p=None, num_return_sequences=count, eos_token_id=self.end, pad_token_id=self.end,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        ids = out.sequences[:, prompt["input_ids"].shape[1] :]
        logprobs = torch.stack(
            [step.float().log_softmax(-1).gather(1, ids[:, n, None])[:, 0] for n, step in enumerate(out.logits)], 1
        )
        rows = []
        for row, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True):
            length = row.index(self.end) + 1 if self.end in row else len(row)
            rows.append((row[:length], logprob[:length]))
        return [rows[i : i + count] for i in range(0, len(rows), count)]

    def right(self, message: Message, ids: list[int]) -> dict[str, float]:
        return right_fields(message, self.tokenizer.decode(ids, skip_special_tokens=True))

    def example(self, message: Message, ids: list[int], logprobs: list[float], step: int, advantage: float) -> Example:
        text = self.tokenizer.apply_chat_template(message.prompt, tokenize=False, add_generation_prompt=True)
        prompt = self.tokenizer(text)["input_ids"]
        whole = np.array([*prompt, *ids], np.int32)
        trained = np.arange(len(whole)) >= len(prompt)
        known = np.concatenate([np.full(len(prompt), np.nan), logprobs]).astype(np.float32)
        steps = np.where(trained, step, -1).astype(np.int32)
        return Example(TokenSequence("", whole, trained, known, steps, np.ones(len(whole), np.float32)), advantage)

    def warm_start(self, seed: int, rate: float, epochs: int) -> TrainState:
        """Return the base model after supervised training on the demo's examples, eight an update."""
        rows = [message("train", EXAMPLES_FROM + n, seed) for n in range(EXAMPLES)]
        updates = epochs * EXAMPLES // 8
        state = self.fresh
        for update in range(updates):
            part = [rows[(update * 8 + n) % EXAMPLES] for n in range(8)]
            self.engine.configure(
                self.config({"loss": {"type": "sft"}, "optimizer": {"learning_rate": rate * (1 - update / updates)}})
            )
            examples = []
            for row in part:
                ids = [*self.tokenizer(row.right)["input_ids"], self.end]
                examples.append(self.example(row, ids, [-1.0] * len(ids), state.step, 1.0))
            state = self.engine.step(state, examples, list(range(8))).state
        return self.engine.state_with(0, state.master or state.weights)

    def held_out(self, state: TrainState, count: int) -> float:
        """Return the share of held-out messages of which all fields are right, by the most probable tokens."""
        self.load(state)
        solved = []
        for first in range(0, count, 48):
            part = [message("held_out", first + n) for n in range(min(48, count - first))]
            solved += [self.right(m, a[0][0])["solved"] for m, a in zip(part, self.answers(part, 1, 0.0), strict=True)]
        return fmean(solved)

    def learn(self, state: TrainState, seed: int, cell: dict[str, Any], steps: int) -> tuple[TrainState, list[Any]]:
        """Train from `state` with the settings of `cell`. Returns the end and a row for each step."""
        size, groups = cell["group_size"], cell["groups"]
        curve = []
        for step in range(steps):
            began = time.perf_counter()
            self.load(state)
            part = [message("train", step * groups + n, seed) for n in range(groups)]
            self.engine.configure(
                self.config({
                    "loss": {"advantage_scaling": "none", "beta": cell["beta"], "epsilon": cell["epsilon"]},
                    "optimizer": {"learning_rate": cell["rate"], "warmup_steps": cell["warmup"]},
                })
            )
            examples, owners, solved = [], [], []
            for number, (m, sampled) in enumerate(zip(part, self.answers(part, size, 1.0), strict=True)):
                right = [self.right(m, ids) for ids, _ in sampled]
                solved += [r["solved"] for r in right]
                rewards = [(r["team"] + r["urgency"] + r["order"]) / 3 for r in right]
                spread = stdev(rewards)
                if spread < 1e-6:
                    continue
                for (ids, logprobs), reward in zip(sampled, rewards, strict=True):
                    advantage = (reward - fmean(rewards)) / (spread if cell["scaling"] == "group" else 1.0)
                    examples.append(self.example(m, ids, logprobs, state.step, advantage))
                    owners.append(number)
            row: dict[str, Any] = {"solved": fmean(solved), "groups": len(set(owners))}
            if examples:
                result = self.engine.step(state, examples, owners)
                state = result.state
                row |= {k: result.metrics[k] for k in ("entropy", "grad_norm") if k in result.metrics}
            curve.append(row | {"s": round(time.perf_counter() - began, 1)})
            print(json.dumps(cell | {"seed": seed, "step": step + 1} | curve[-1]), flush=True)
        return state, curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="default: the demo's model")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--warm-rate", type=float, default=1e-3)
    parser.add_argument("--warm-epochs", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-5, 2e-4, 8e-4])
    parser.add_argument("--scaling", nargs="+", choices=("none", "group"), default=["none"])
    parser.add_argument("--group-size", type=int, nargs="+", default=[8])
    parser.add_argument("--groups", type=int, nargs="+", default=[12])
    parser.add_argument("--beta", type=float, nargs="+", default=[0.0])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.2])
    parser.add_argument("--warmup", type=int, nargs="+", default=[3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--held-out", type=int, default=144)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    learner = Learner(args.base or packaged.make(), args.rank)
    names = ("rate", "scaling", "group_size", "groups", "beta", "epsilon", "warmup")
    cells = [
        dict(zip(names, values, strict=True))
        for values in itertools.product(
            args.rates, args.scaling, args.group_size, args.groups, args.beta, args.epsilon, args.warmup
        )
    ]
    rows = []
    for seed in args.seeds:
        torch.manual_seed(seed)
        warm = learner.warm_start(seed, args.warm_rate, args.warm_epochs)
        before = learner.held_out(warm, args.held_out)
        print(json.dumps({"seed": seed, "warm_start": before}), flush=True)
        for cell in cells:
            state, curve = learner.learn(warm, seed, cell, args.steps)
            after = learner.held_out(state, args.held_out)
            print(json.dumps(cell | {"seed": seed, "before": before, "after": after}), flush=True)
            rows.append(cell | {"seed": seed, "before": before, "after": after, "curve": curve})
            args.out.write_text(json.dumps({"model": str(args.base or "smollm2"), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
