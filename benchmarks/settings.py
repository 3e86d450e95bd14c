"""What each setting of a first run does to what is learned: rate, scaling of advantages, group size, clipping, KL.

    python -m benchmarks.settings inbox --start runs/demo/warm_start    # make demo's job, SmolLM2-135M
    python -m benchmarks.settings game                                  # make demo-game's, a model of 0.95 M parameters

One setting is changed at a time from those of the demo, with three seeds: other tasks, other samples, another order.
All runs in one process: the trainer's engine takes the steps, and its own model samples, one step behind, as where
rollouts and training overlap. Before the first and after the last step it answers held-out tasks by the most probable
tokens. `benchmarks/results/settings.jsonl` grows by a line a run; a run whose line is there is not run again.
docs/pictures/settings.svg shows them all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from benchmarks.bench import RESULTS
from examples.common import packaged
from examples.common.curve import as_svg
from examples.common.running import fast_bfloat16
from examples.inbox.agent import MAX_TOKENS
from examples.inbox.messages import message, right_fields, share
from examples.tictactoe.game import Game, describe, opening_seed
from pipeline.config import TrainerConfig
from trainer.batches.examples import Example
from trainer.engine.engine import Engine
from trainer.sequences import TokenSequence

OUT = RESULTS / "settings.jsonl"
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "settings.svg"
EXAMPLES = Path(packaged.__file__).parent.parent
SEEDS = (0, 1, 2)
_STD_FLOOR = 1e-4


@dataclass
class Attempt:
    """A conversation at a task: its tokens, and the logprob in nats of each token, NaN if it was not sampled."""

    ids: list[int]
    logprobs: list[float]
    reward: float = 0.0
    solved: float = 0.0

    def add_context(self, ids: Sequence[int]) -> None:
        """Append tokens that were not sampled."""
        self.ids += ids
        self.logprobs += [math.nan] * len(ids)

    def sequence(self, step: int) -> TokenSequence:
        """Return the conversation as the trainer reads it. `step`: that of the version which sampled."""
        logprobs = np.array(self.logprobs, np.float32)
        sampled = ~np.isnan(logprobs)
        steps = np.where(sampled, step, -1).astype(np.int32)
        ids, temperatures = np.array(self.ids, np.int32), np.ones(len(steps), np.float32)
        return TokenSequence("run", ids, sampled, logprobs, steps, temperatures)


class Policy:
    """A model that answers: the adapter that is live in an engine."""

    def __init__(self, engine: Engine, tokenizer: Any, seed: int) -> None:
        self._engine, self.tokenizer = engine, tokenizer
        self._generator = torch.Generator().manual_seed(seed)
        self.temperature = 1.0
        """1 for training; 0: the most probable tokens."""

    @torch.no_grad()
    def answer(self, attempts: Sequence[Attempt], at_most: int) -> list[str]:
        """Sample the next turn of each attempt, of `at_most` tokens or less, and append it. Returns the texts."""
        model = self._engine.model.peft.get_base_model()
        end, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id or 0
        prompt_lengths = [len(a.ids) for a in attempts]
        # The attempts of a group have one prompt, which is computed once.
        prompts = list(dict.fromkeys(tuple(a.ids) for a in attempts))
        of_attempt = torch.tensor([prompts.index(tuple(a.ids)) for a in attempts])
        width = max(map(len, prompts))
        ids_BT = torch.tensor([[pad] * (width - len(ids)) + list(ids) for ids in prompts])
        mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        ended_B = torch.zeros(len(attempts), dtype=torch.bool)
        cache = None
        for number in range(at_most):
            positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)[:, -ids_BT.shape[1] :]
            out = model.model(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                position_ids=positions_BT,
                past_key_values=cache,
                use_cache=at_most > 1,
            )
            cache = out.past_key_values
            logprobs_BV = model.lm_head(out.last_hidden_state[:, -1].contiguous()).float().log_softmax(-1)
            if not number:
                logprobs_BV, mask_BT = logprobs_BV[of_attempt], mask_BT[of_attempt]
                if cache is not None:
                    cache.batch_select_indices(of_attempt)
            if self.temperature:
                ids_BT = torch.multinomial(logprobs_BV.exp(), 1, generator=self._generator)
            else:
                ids_BT = logprobs_BV.argmax(-1, keepdim=True)
            sampled_B = logprobs_BV.gather(-1, ids_BT).squeeze(-1)
            for i in (~ended_B).nonzero().flatten().tolist():
                attempts[i].ids.append(int(ids_BT[i]))
                attempts[i].logprobs.append(float(sampled_B[i]))
            ended_B |= ids_BT.squeeze(-1) == end
            if ended_B.all():
                break
            mask_BT = torch.cat([mask_BT, torch.ones_like(ids_BT)], 1)
        answers = [a.ids[length:] for a, length in zip(attempts, prompt_lengths, strict=True)]
        return list(self.tokenizer.batch_decode(answers, skip_special_tokens=True))

    def prompt_ids(self, messages: list[Any]) -> list[int]:
        """Return the token ids of a conversation that the model is to continue."""
        ids: list[int] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return ids


@dataclass
class Task:
    """A job of the examples, played by a model in this process."""

    play: Callable[[Policy, str, Sequence[int], int], list[Attempt]]
    """Makes an attempt at each task with a number, of a split ("train", "held_out") and a seed."""
    settings: dict[str, Any]
    """The table `trainer` of the demo's settings file."""
    steps: int
    groups: dict[int, int]
    """Groups a step by their size. A step has as many samples whatever the size. The second is the demo's."""
    held_out: int
    """Number of held-out tasks."""
    changes: Mapping[str, Sequence[Any]]
    """The other values of each setting, by dotted names."""
    dtype: str

    @property
    def variants(self) -> list[dict[str, Any]]:
        """The demo's settings, and each change of one of them."""
        return [{}, *({name: value} for name, values in self.changes.items() for value in values)]


def sort_inbox(policy: Policy, split: str, numbers: Sequence[int], seed: int) -> list[Attempt]:
    """`make demo`'s job: one answer to each message; solved if all fields are right."""
    messages = [message("train" if split == "train" else "held_out", n, seed) for n in numbers]
    attempts = [Attempt([], []) for _ in messages]
    for attempt, m in zip(attempts, messages, strict=True):
        attempt.add_context(policy.prompt_ids(m.prompt))
    for attempt, m, text in zip(attempts, messages, policy.answer(attempts, MAX_TOKENS), strict=True):
        right = right_fields(m, text)
        attempt.reward, attempt.solved = share(right), right["solved"]
    return attempts


def play_games(policy: Policy, split: str, numbers: Sequence[int], seed: int) -> list[Attempt]:
    """`make demo-game`'s job: a game against a random opponent, a call for each move; solved if it is won."""
    games = [Game(opening_seed("val" if split == "held_out" else split, n, seed)) for n in numbers]
    attempts = [Attempt([], []) for _ in games]
    talks: list[list[Any]] = [[] for _ in games]
    while unfinished := [i for i, game in enumerate(games) if game.result is None]:
        for i in unfinished:
            talks[i].append({"role": "user", "content": describe(games[i].board)})
            # What was sampled stays as it is: only what comes after it is read.
            attempts[i].add_context(policy.prompt_ids(talks[i])[len(attempts[i].ids) :])
        for i, text in zip(unfinished, policy.answer([attempts[i] for i in unfinished], 1), strict=True):
            talks[i].append({"role": "assistant", "content": text})
            games[i].play(text)
    for attempt, game in zip(attempts, games, strict=True):
        attempt.reward, attempt.solved = game.reward, float(game.result == "win")
    return attempts


def trainer_of(example: str, **optimizer: Any) -> dict[str, Any]:
    """Return the table `trainer` of an example's settings, with other values of the optimizer."""
    table: dict[str, Any] = tomllib.loads((EXAMPLES / example / "journeywork.toml").read_text())["trainer"]
    return table | {"optimizer": table["optimizer"] | optimizer}


TASKS = {
    "inbox": Task(
        sort_inbox,
        trainer_of("inbox", warmup_steps=4),  # the demo's 15 are for three times as many steps
        steps=16,
        groups={4: 12, 8: 6, 16: 3},
        held_out=84,
        changes={
            "optimizer.learning_rate": (1e-3, 1e-4),
            "optimizer.warmup_steps": (0,),
            "loss.advantage_scaling": ("group",),
            "group_size": (4, 16),
            "optimizer.max_grad_norm": (1.0,),
            "loss.beta": (0.05,),
            "loss.importance_sampling": ("none",),
        },
        dtype="bfloat16" if fast_bfloat16() else "float32",
    ),
    "game": Task(
        play_games,
        trainer_of("tictactoe"),
        steps=60,
        groups={3: 24, 6: 12, 12: 6},
        held_out=400,
        changes={
            "optimizer.learning_rate": (6e-4, 2e-3, 2e-2),
            "lora.rank": (2, 32),
            "loss.advantage_scaling": ("group",),
            "group_size": (3, 12),
            "optimizer.max_grad_norm": (0.1,),
            "loss.beta": (0.05,),
            "loss.importance_sampling": ("none",),
        },
        dtype="float32",
    ),
}


def configured(task: Task, changes: dict[str, Any], seed: int, threads: int) -> TrainerConfig:
    """Return the demo's settings with `changes`, whose names are dotted."""
    values: dict[str, Any] = json.loads(json.dumps(task.settings))
    for name, value in changes.items():
        if name == "group_size":  # a setting of the judge
            continue
        table, key = name.split(".")
        values.setdefault(table, {})[key] = value
    return msgspec.convert(values | {"seed": seed, "threads": threads, "dtype": task.dtype}, TrainerConfig)


def run(task: Task, base: Path, start: Path | None, changes: dict[str, Any], seed: int, threads: int) -> dict[str, Any]:
    """Train with the settings `changes` and return the row of the result."""
    config = configured(task, changes, seed, threads)
    engine = Engine(str(base), config)
    policy = Policy(engine, AutoTokenizer.from_pretrained(base), seed)
    state = engine.state_with(0, load_file(start / "adapter_model.safetensors") if start else engine.model.weights())
    size = changes.get("group_size", sorted(task.groups)[1])
    count, began = task.groups[size], time.perf_counter()

    def play(step: int) -> list[Attempt]:
        """Return attempts of the live version at the tasks of a step, group after group."""
        numbers = [step * count + group for group in range(count) for _ in range(size)]
        return task.play(policy, "train", numbers, seed)

    def evaluate() -> dict[str, float]:
        """Return the mean reward of the live version on the held-out tasks, and the share that it solves."""
        policy.temperature = 0.0
        attempts = task.play(policy, "held_out", range(task.held_out), 0)
        policy.temperature = 1.0
        return {"reward": fmean(a.reward for a in attempts), "solved": fmean(a.solved for a in attempts)}

    engine.model.load_adapter(state.weights)
    before, curve, metrics = evaluate(), [], []
    sampled_at, batch = 0, play(0)
    for step in range(task.steps):
        next_batch = play(step + 1)
        examples, group_of = [], []
        for group in range(count):
            members = batch[group * size : (group + 1) * size]
            rewards = [a.reward for a in members]
            if len(set(rewards)) == 1:
                continue
            spread = stdev(rewards) + _STD_FLOOR if config.loss.advantage_scaling == "group" else 1.0
            examples += [Example(a.sequence(sampled_at), (a.reward - fmean(rewards)) / spread) for a in members]
            group_of += [group] * size
        curve.append(fmean(a.reward for a in batch))
        sampled_at = state.step
        if examples:
            result = engine.step(state, examples, group_of)
            state = result.state
            metrics.append({n: round(v, 4) for n, v in result.metrics.items() if n in ("entropy", "kl", "grad_norm")})
            engine.model.load_adapter(state.weights)
        batch = next_batch
    return {
        "changes": changes,
        "seed": seed,
        "before": before,
        "after": evaluate(),
        "rewards": [round(r, 4) for r in curve],
        "metrics": metrics,
        "s": round(time.perf_counter() - began, 1),
    }


def variant_name(changes: dict[str, Any]) -> str:
    """Return the name of the settings `changes` in the picture and the table."""
    return ", ".join(f"{name.rpartition('.')[2]} = {value}" for name, value in changes.items()) or "as the demo"


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """Return the picture of all runs as SVG: what the share of solved held-out tasks gained, a dot a seed."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    titles = {"inbox": "inbox, 135 M parameters", "game": "tic-tac-toe, 0.95 M parameters"}
    shown = [task for task in titles if any(row["task"] == task for row in rows)]
    variants = {
        task: list(dict.fromkeys(variant_name(r["changes"]) for r in rows if r["task"] == task)) for task in shown
    }
    with mpl.rc_context({"font.family": "sans-serif", "font.size": 8}):
        heights = [len(variants[task]) for task in shown]
        figure, axes = plt.subplots(
            len(shown), figsize=(5.6, 0.9 + 0.22 * sum(heights)), height_ratios=heights, layout="constrained"
        )
        for axis, task in zip(np.atleast_1d(axes), shown, strict=True):
            for at, name in enumerate(variants[task]):
                of_variant = [r for r in rows if r["task"] == task and variant_name(r["changes"]) == name]
                gains = [r["after"]["solved"] - r["before"]["solved"] for r in of_variant]
                axis.plot(gains, [at] * len(gains), "o", color="#2b6cb0", alpha=0.6, markersize=4)
                axis.plot([fmean(gains)], [at], "|", color="#c05621", markersize=11, markeredgewidth=2)
            axis.axvline(0, color="#888888", linewidth=0.8)
            axis.set_yticks(range(len(variants[task])), variants[task])
            axis.invert_yaxis()
            axis.set_title(titles[task], loc="left", fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("gain in solved held-out tasks; a dot a seed, a line their mean")
        return as_svg(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--start", type=Path, help="folder with the adapter that training begins with")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    task = TASKS[args.task]
    base = packaged.make() if args.task == "inbox" else EXAMPLES / "tictactoe" / "model"
    for changes, seed in itertools.product(task.variants, SEEDS):
        rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
        if any(r["task"] == args.task and r["changes"] == changes and r["seed"] == seed for r in rows):
            continue
        row = {"task": args.task, **run(task, base, args.start, changes, seed, args.threads)}
        solved = " to ".join(f"{row[when]['solved']:.3f}" for when in ("before", "after"))
        print(f"{args.task}, {variant_name(changes)}, seed {seed}: solved {solved}, {row['s']} s", flush=True)
        with args.out.open("a") as out:
            out.write(json.dumps(row) + "\n")
    if args.out == OUT:
        PICTURE.write_text(draw([json.loads(line) for line in OUT.read_text().splitlines()]), "utf-8")


if __name__ == "__main__":
    main()
