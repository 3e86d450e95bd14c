"""`make demo`'s training beside TRL's: how long each needs to the same held-out score, from the same warm start.

    python -m examples.inbox.demo --seed 0 --run-dir runs/demo-0
    python -m benchmarks.peer runs/demo-0 [runs/demo-1 ...]

TRL's `GRPOTrainer` with its own generation trains on the same messages, examples, group size, rank, rate and number of
tokens, on both cores. Every ten steps it answers the held-out messages, by the most probable tokens; that time is not
counted. It ends at the demo's score, or after twice the demo's time or steps. Writes benchmarks/results/peer.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time
import tomllib
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.bench import RESULTS, write_results
from examples.common import packaged
from examples.common.running import fast_bfloat16
from examples.inbox.agent import MAX_TOKENS
from examples.inbox.demo import SETTINGS, WARM_START
from examples.inbox.messages import message, right_fields, share
from examples.inbox.ways import GROUP_SIZE, GROUPS_PER_STEP
from pipeline.config import OptimizerConfig
from trainer.trl_trainers import plain_logprobs, trl_imports

with trl_imports():
    from trl import GRPOConfig, GRPOTrainer

EVALUATE_EVERY = 10
"""Steps between two evaluations."""


class _Evaluations(TrainerCallback):
    """Evaluates the policy by `score` every few steps, and ends the training at the score `goal` or after `seconds`."""

    def __init__(self, score: Any, goal: float, seconds: float) -> None:
        self._score, self._goal, self._seconds = score, goal, seconds
        self._began, self._paused = time.perf_counter(), 0.0
        self.rows: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Evaluate if it is time to, as transformers calls this after each step. Returns `control`."""
        spent = time.perf_counter() - self._began - self._paused
        if state.global_step % EVALUATE_EVERY == 0 or spent > self._seconds or state.global_step == state.max_steps:
            began = time.perf_counter()
            self.rows.append({"step": state.global_step, "s": round(spent, 1), "solved": self._score()})
            self._paused += time.perf_counter() - began
            print(json.dumps(self.rows[-1]), flush=True)
            control.should_training_stop = self.rows[-1]["solved"] >= self._goal or spent > self._seconds
        return control


def reward(completions: list[Any], number: list[int], seed: list[int], **_: Any) -> list[float]:
    """Return the demo's reward of each completion: the share of right fields."""
    return [
        share(right_fields(message("train", n, s), reply[0]["content"]))
        for reply, n, s in zip(completions, number, seed, strict=True)
    ]


def train(run_dir: Path) -> dict[str, Any]:
    """Train with TRL from the warm start of a demo that has ended. Returns both sides' times and scores."""
    report = json.loads((run_dir / "report.json").read_text())
    trainer_settings = tomllib.loads(SETTINGS.read_text())["trainer"]
    settings = trainer_settings["optimizer"]
    base, seed = packaged.make(), report["seed"]
    dtype = torch.bfloat16 if fast_bfloat16() else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    policy = PeftModel.from_pretrained(model, run_dir / WARM_START, is_trainable=True)
    held_out = [message("held_out", n) for n in range(report["held_out"]["trained"]["n"])]

    @torch.no_grad()
    def score() -> float:
        """Return the share of held-out messages that the policy solves by the most probable tokens."""
        policy.eval()
        solved = []
        for first in range(0, len(held_out), 42):
            part = held_out[first : first + 42]
            texts = [tokenizer.apply_chat_template(m.prompt, tokenize=False, add_generation_prompt=True) for m in part]
            prompt = tokenizer(texts, return_tensors="pt", padding=True)
            ids = policy.generate(**prompt, max_new_tokens=MAX_TOKENS, do_sample=False)
            replies = tokenizer.batch_decode(ids[:, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
            solved += [right_fields(m, reply)["solved"] for m, reply in zip(part, replies, strict=True)]
        policy.train()
        return fmean(solved)

    steps = report["steps"]
    rows = [
        {"prompt": message("train", n, seed).prompt, "number": n, "seed": seed}
        for n in range(2 * steps * GROUPS_PER_STEP)
    ]
    evaluations = _Evaluations(score, report["held_out"]["trained"]["value"], 2 * report["train_s"])
    with TemporaryDirectory() as scratch, plain_logprobs("cpu"):
        args = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            seed=seed,
            max_steps=2 * steps,
            num_generations=GROUP_SIZE,
            per_device_train_batch_size=GROUP_SIZE,
            gradient_accumulation_steps=GROUPS_PER_STEP,
            max_completion_length=MAX_TOKENS,
            temperature=1.0,
            beta=0.0,
            entropy_coef=trainer_settings["loss"]["entropy_coef"],
            scale_rewards="none",
            learning_rate=settings["learning_rate"],
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=settings["warmup_steps"],
            max_grad_norm=settings.get("max_grad_norm", OptimizerConfig().max_grad_norm),
            gradient_checkpointing=False,
            shuffle_dataset=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[evaluations],
        )
        trainer.train()
    last = evaluations.rows[-1]
    reached = last["solved"] >= report["held_out"]["trained"]["value"]
    return {
        "seed": seed,
        "journeywork": {"s": report["train_s"], "steps": steps - 1, "solved": report["held_out"]["trained"]["value"]},
        "trl": {**last, "reached": reached, "looks": evaluations.rows},
        "time_against_trl": round(report["train_s"] / last["s"], 3) if reached else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run directories of demos that have ended")
    parser.add_argument("--out", type=Path, default=RESULTS / "peer.json")
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    runs = [train(run) for run in args.runs]
    command = f"python -m benchmarks.peer {shlex.join(map(str, args.runs))}"
    write_results(args.out, {"command": command, "runs": runs, "threads": torch.get_num_threads()})


if __name__ == "__main__":
    main()
