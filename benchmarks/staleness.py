# ruff: noqa: E402 - the search path is put right before our own packages are imported
"""Benchmark of staleness and its corrections: reward after equal numbers of samples at forced version lags.

    python benchmarks/staleness.py [--steps 40] [--lags 0 1 2 4 8] [--seeds 0 1 2] [--workers 1]
                                   [--out benchmarks/results/staleness.json]

The demo's task (tic-tac-toe, the same model, groups of one opening each), with the sampler in the same process, so
that the lag is exact: step s trains on games played by version max(0, s - lag). Every run sees the same number of
games. The measure is the mean reward of `--games` held-out games, the same for all runs, with the final adapter. At
lag 0 every ratio is 1 and all corrections are one computation: it is run once per seed, and once more with each
correction on the first seed to show that. Where no ratio of a truncating run was ever beyond the bound, the masking
run is the same one too and is not computed again. Seeds come one after the other, so that a sweep that is stopped has
every cell of the seeds it ended. Finished runs are kept in the file: started again, it goes on."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# This file's folder would be searched first, and benchmarks/trainer.py found in place of the package `trainer`.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch
from transformers import AutoTokenizer, DynamicCache

from examples.tictactoe.game import Game, describe, opening_seed
from pipeline.config import TrainerConfig, load, with_values
from pipeline.events import ExchangeRecorded, GroupScored, Member, pack_ids, pack_logprobs
from pipeline.log.messages import Place
from trainer.batches.groups import TrainingGroup, examples
from trainer.batches.sequences import build
from trainer.engine.engine import Engine
from trainer.engine.state import Weights

CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


class Table:
    """Games that go on side by side over one key-value cache.

    A legal move is one token and an illegal one ends the game. So all running games have the same number of tokens,
    and the cache is rectangular."""

    def __init__(self, arena: Arena, seeds: list[str], random: torch.Generator) -> None:
        self.arena, self.random = arena, random
        self.games = [Game(s) for s in seeds]
        self.ids: list[list[int]] = [[] for _ in seeds]
        """All tokens of a game so far; the template ends the model's turns."""
        self.cache = DynamicCache()
        self.cached = 0
        self.live = list(range(len(seeds)))

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits after the last of the new tokens [R, n]."""
        positions = torch.arange(self.cached, self.cached + rows.shape[1]).expand(len(rows), -1)
        out = self.arena.engine.model.peft(
            input_ids=rows,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.cached += rows.shape[1]
        return out.logits[:, -1]  # type: ignore[no-any-return]

    def _first(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of the first turn, with an empty cache. There are few different openings: each goes through
        the model once."""
        unique, inverse = torch.unique(rows, dim=0, return_inverse=True)
        logits = self._logits(unique)
        self.cache.batch_select_indices(inverse)
        return logits[inverse]

    def turn(self) -> list[tuple[int, list[int], list[int], list[float]]]:
        """Sample one move in every running game: its number, the prompt, the reply and the reply's logprobs."""
        prompts = [self.ids[i] + self.arena.turn_ids(self.games[i].board) for i in self.live]
        rows = torch.tensor([p[self.cached :] for p in prompts])
        logits = self._logits(rows) if self.cached else self._first(rows)
        scores = torch.log_softmax(logits.float(), -1)
        chosen = torch.multinomial(scores.exp(), 1, generator=self.random)
        replies: list[list[int]] = chosen.tolist()
        logprobs: list[list[float]] = scores.gather(1, chosen).tolist()
        played = list(zip(self.live, prompts, replies, logprobs, strict=True))
        kept = []
        for r, (i, prompt, reply, _) in enumerate(played):
            text = self.arena.tokenizer.decode(reply, skip_special_tokens=True)
            if self.games[i].play(text) is None:
                self.ids[i] = [*prompt, *reply, self.arena.end]
                kept.append(r)
        self.live = [self.live[r] for r in kept]
        self.cache.batch_select_indices(torch.tensor(kept, dtype=torch.long))
        return played


class Arena:
    """Plays games in batches with an adapter of `engine`."""

    def __init__(self, engine: Engine, base: str) -> None:
        self.engine = engine
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        self.end = int(engine.model.peft.config.eos_token_id)
        self._turns: dict[str, list[int]] = {}

    def turn_ids(self, board: str) -> list[int]:
        """The tokens that the chat template adds for a user's turn; they do not depend on what came before."""
        if board not in self._turns:
            chat = [{"role": "user", "content": describe(board)}]
            text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            self._turns[board] = list(self.tokenizer(text, add_special_tokens=False).input_ids)
        return self._turns[board]

    @torch.no_grad()
    def play(
        self, seeds: list[str], weights: Weights, step: int, random: torch.Generator
    ) -> list[tuple[float, list[ExchangeRecorded]]]:
        """A game per seed: its reward and its exchanges."""
        self.engine.model.load_adapter(weights)
        table = Table(self, seeds, random)
        recorded: list[list[ExchangeRecorded]] = [[] for _ in seeds]
        while table.live:
            for i, prompt, ids, logprobs in table.turn():
                recorded[i].append(
                    ExchangeRecorded(
                        project="p", trajectory=str(i), seq=len(recorded[i]), model="m", policy_version=f"m@{step}",
                        step=step, request=b"{}", response=b"{}", prompt_ids=pack_ids(prompt),
                        sampled_ids=pack_ids(ids), logprobs=pack_logprobs(logprobs),
                    )
                )  # fmt: skip
        return [(g.reward, r) for g, r in zip(table.games, recorded, strict=True)]


def one_run(engine: Engine, base: str, lag: int, seed: int, args: argparse.Namespace) -> dict[str, float]:
    began = time.perf_counter()
    arena = Arena(engine, base)
    random = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    state = engine.initial_state()
    versions = {0: state.weights}
    rewards, ratios, cut, differences = [], [], [], []
    highest = {"token": 1.0, "sequence": 1.0}
    opening = 0
    for step in range(args.steps):
        batch: list[TrainingGroup] = []
        at = max(0, step - lag)
        seeds = [opening_seed("train", opening + g, seed) for g in range(args.groups)]
        opening += args.groups
        played = arena.play([s for s in seeds for _ in range(args.group_size)], versions[at], at, random)
        rewards.append(statistics.mean(r for r, _ in played))
        for g in range(args.groups):
            part = played[g * args.group_size : (g + 1) * args.group_size]
            members = tuple(
                Member(trajectory=e[0].trajectory, reward=r, first_step=at, last_step=at) for r, e in part
            )
            if max(r for r, _ in part) - min(r for r, _ in part) <= 1e-6:
                continue
            scored = GroupScored(project="p", group=str(g), model="m", judge="agent", members=members)
            sequences = [s for _, e in part for s in build(e[0].trajectory, e)]
            batch.append(TrainingGroup(scored, Place(g, 0), sequences=sequences))
        if batch:
            indices = [i for i, group in enumerate(batch) for _ in group.sequences or ()]
            result = engine.step(state, examples(batch, engine.config), indices)
            state = result.state
            ratios.append(result.metrics["ratio_p95"])
            for level, name in (("token", "ratio_max"), ("sequence", "ratio_sequence_max")):
                highest[level] = max(highest[level], result.metrics[name])
            cut.append(result.metrics["clip_share"])
            differences.append(result.metrics["kl_sampler"])
        versions[step + 1] = state.weights
        versions.pop(step - lag, None)
    held_out = [opening_seed("val", n) for n in range(args.games)]
    final = [
        r for r, _ in arena.play(held_out, state.weights, args.steps, torch.Generator().manual_seed(1234))
    ]
    return {
        "reward": statistics.mean(final),
        "standard_error": float(np.std(final, ddof=1) / np.sqrt(len(final))),
        "last_training_reward": statistics.mean(rewards[-4:]),
        "ratio_p95": statistics.mean(ratios),
        "clip_share": statistics.mean(cut),
        "kl_sampler": statistics.mean(differences),
        "token_ratio_max": highest["token"],
        "sequence_ratio_max": highest["sequence"],
        "first_training_reward": rewards[0],
        "seconds": time.perf_counter() - began,
    }


def table(runs: dict[str, dict[str, Any]], lags: list[int]) -> list[str]:
    """Mean over seeds and its standard error, as a Markdown table."""
    lines = [
        "| correction | " + " | ".join(f"lag {lag}" for lag in lags) + " |",
        "| --- |" + " --- |" * len(lags),
    ]
    for correction in CORRECTIONS:
        cells = []
        for lag in lags:
            # Without lag every ratio is 1 and the corrections are one computation.
            name = correction if lag else CORRECTIONS[0]
            found = [r["reward"] for k, r in runs.items() if k.startswith(f"{name}/{lag}/")]
            spread = f" ± {statistics.stdev(found) / len(found) ** 0.5:.3f}" if len(found) > 1 else ""
            cells.append(f"{statistics.mean(found):.3f}{spread}" if found else "–")
        lines.append(f"| `{correction}` | " + " | ".join(cells) + " |")
    return lines


def paired(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Each correction against `token_truncate` at the same lag and seed, over all lags but 0: mean and standard
    error."""
    out = {}
    for correction in CORRECTIONS:
        against = [
            r["reward"] - runs[other]["reward"]
            for k, r in runs.items()
            if k.startswith(f"{correction}/")
            and not k.startswith(f"{correction}/0/")
            and (other := "token_truncate" + k[len(correction) :]) in runs
        ]
        if correction != "token_truncate" and len(against) > 1:
            error = statistics.stdev(against) / len(against) ** 0.5
            out[correction] = {
                "mean": statistics.mean(against),
                "standard_error": error,
                "pairs": len(against),
            }
    return out


class Worker:
    """The engine of one worker process."""

    here: Worker

    def __init__(self, args: argparse.Namespace, config: TrainerConfig) -> None:
        self.args, self.config = args, config
        self.scratch = tempfile.TemporaryDirectory()
        self.engine = Engine(args.base, config, Path(self.scratch.name))
        self.fresh = self.engine.model.weights()

    @classmethod
    def start(cls, args: argparse.Namespace, config: TrainerConfig) -> None:
        cls.here = cls(args, config)

    def one(self, key: str) -> dict[str, float]:
        correction, lag, seed = key.split("/")
        self.engine.model.load_adapter(self.fresh)
        self.engine.configure(with_values(self.config, {"loss.importance_sampling": correction}))
        return one_run(self.engine, self.args.base, int(lag), int(seed), self.args)

    @classmethod
    def run(cls, keys: tuple[str, ...]) -> dict[str, dict[str, float]]:
        """Compute the runs `keys`: one run, or a truncating run and its masking twin. If no ratio of the truncating run
        exceeded the bound, the twin is the same and is not computed."""
        first, *twin = keys
        out = {first: cls.here.one(first)}
        for key in twin:
            level = key.partition("_")[0]
            same = out[first][f"{level}_ratio_max"] <= cls.here.config.loss.importance_clip
            out[key] = out[first] if same else cls.here.one(key)
        return out


def wanted(args: argparse.Namespace) -> list[str]:
    """The keys of all runs, correction/lag/seed, in the order in which they are computed."""
    return [
        f"{correction}/{lag}/{seed}"
        for seed in args.seeds
        for lag in args.lags
        for correction in args.corrections
        if lag or correction == CORRECTIONS[0] or seed == args.seeds[0]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="examples/tictactoe/model")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=12, help="groups per step")
    parser.add_argument("--group-size", type=int, default=6)
    parser.add_argument("--games", type=int, default=2000, help="held-out games")
    parser.add_argument(
        "--config", default="examples/tictactoe/journeywork.toml", help="whose [trainer] is used"
    )
    parser.add_argument("--learning-rate", type=float, default=None)
    parser.add_argument("--loss-type", default=None)
    parser.add_argument("--lags", type=int, nargs="*", default=[0, 1, 2, 4, 8])
    parser.add_argument("--corrections", nargs="*", default=list(CORRECTIONS), choices=CORRECTIONS)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="runs side by side, a process each")
    parser.add_argument("--out", default="benchmarks/results/staleness.json")
    args = parser.parse_args()
    out = Path(args.out)
    given = load(args.config).trainer
    asked = {"optimizer.learning_rate": args.learning_rate, "loss.type": args.loss_type}
    config = with_values(
        given,
        {"threads": args.threads, "max_staleness": 10_000, "check_share": 0.0}
        | {name: value for name, value in asked.items() if value},
    )
    settings = {k: getattr(args, k) for k in ("steps", "groups", "group_size", "games")}
    settings |= {
        "learning_rate": config.optimizer.learning_rate, "loss_type": config.loss.type, "epsilon": config.loss.epsilon,
        "advantage_scaling": config.loss.advantage_scaling, "importance_clip": config.loss.importance_clip,
    }  # fmt: skip
    report: dict[str, Any] = {"settings": settings, "runs": {}}
    if out.exists() and (before := json.loads(out.read_text()))["settings"] == settings:
        report["runs"] = before["runs"]
    missing = [key for key in wanted(args) if key not in report["runs"]]
    twins = {
        key: key.replace("truncate", "mask") for key in missing if "truncate" in key and "/0/" not in key
    }
    twins = {key: twin for key, twin in twins.items() if twin in missing}
    tasks = [(key, twins[key]) if key in twins else (key,) for key in missing if key not in twins.values()]
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(args.workers, Worker.start, (args, config)) as pool:
        for runs in pool.imap_unordered(Worker.run, tasks):
            report["runs"] |= runs
            for key, run in runs.items():
                print(key, {k: round(v, 4) for k, v in run.items()}, flush=True)
            report["table"] = table(report["runs"], sorted(set(args.lags)))
            report["against_token_truncate"] = paired(report["runs"])
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(report, indent=2) + "\n")
    print("\n".join(report.get("table", [])))
    print(json.dumps(report.get("against_token_truncate", {}), indent=2))


if __name__ == "__main__":
    main()
