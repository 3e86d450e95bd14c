# ruff: noqa: E402 - the search path is put right before our own packages are imported
"""How much staleness costs, and what each correction gives back: reward after equal samples at forced version lags.

    python benchmarks/staleness.py [--steps 24] [--lags 0 1 2 4 8] [--seeds 0 1 2] [--out benchmarks/results/staleness.json]

The demo's task (tic-tac-toe, the same model, groups of one opening each), with the sampler in the same process, so that
the lag is exact: step s trains on games played by version max(0, s - lag). Every run sees the same number of games. The
measure is the mean reward of `--games` held-out games with the final adapter. Finished runs are kept in the file, so the
sweep can be stopped and started again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# This file's folder would be searched first, and benchmarks/trainer.py found in place of the package `trainer`.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import msgspec
import numpy as np
import torch
from transformers import AutoTokenizer

from examples.tictactoe.game import Game, describe, opening_seed
from pipeline.config import load
from pipeline.events import ExchangeRecorded, GroupScored, Member, pack_ids, pack_logprobs
from trainer.engine import Engine, Weights
from trainer.groups import PreparedGroup, examples, prepare
from trainer.sequences import build

CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
MAX_TOKENS = 4


class Arena:
    """Plays games in batches with an adapter of the engine's."""

    def __init__(self, engine: Engine, base: str) -> None:
        self.engine = engine
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        self.end = int(engine.model.config.eos_token_id)

    def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    @torch.no_grad()
    def _sample(
        self, prompts: list[list[int]], random: torch.Generator
    ) -> list[tuple[list[int], list[float]]]:
        """One reply per prompt at temperature 1: token ids and their logprobs."""
        out: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        live = list(range(len(prompts)))
        for _ in range(MAX_TOKENS):
            rows = [prompts[i] + out[i][0] for i in live]
            ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
            for r, row in enumerate(rows):
                ids[r, : len(row)] = torch.tensor(row)
            hidden = self.engine._trunk(input_ids=ids, use_cache=False).last_hidden_state
            last = hidden[torch.arange(len(rows)), torch.tensor([len(r) - 1 for r in rows])]
            logprobs = torch.log_softmax(self.engine._head(last).float(), -1)
            chosen = torch.multinomial(logprobs.exp(), 1, generator=random).squeeze(1)
            for r, i in enumerate(live):
                out[i][0].append(int(chosen[r]))
                out[i][1].append(float(logprobs[r, chosen[r]]))
            live = [i for i in live if out[i][0][-1] != self.end]
            if not live:
                break
        return out

    def play(
        self, seeds: list[str], weights: Weights, step: int, random: torch.Generator
    ) -> list[tuple[float, list[ExchangeRecorded]]]:
        """A game per seed: its reward and its exchanges."""
        self.engine.put(weights)
        games = [Game(s) for s in seeds]
        chats: list[list[dict[str, str]]] = [[] for _ in games]
        recorded: list[list[ExchangeRecorded]] = [[] for _ in games]
        while live := [i for i, g in enumerate(games) if g.result is None]:
            for i in live:
                chats[i].append({"role": "user", "content": describe(games[i].board)})
            prompts = [self._prompt(chats[i]) for i in live]
            for i, prompt, (ids, logprobs) in zip(live, prompts, self._sample(prompts, random), strict=True):
                move = self.tokenizer.decode(ids, skip_special_tokens=True)
                chats[i].append({"role": "assistant", "content": move})
                recorded[i].append(
                    ExchangeRecorded(
                        project="p", trajectory=str(i), seq=len(recorded[i]), model="m", policy_version=f"m@{step}",
                        step=step, request=b"{}", response=b"{}", prompt_ids=pack_ids(prompt),
                        sampled_ids=pack_ids(ids), logprobs=pack_logprobs(logprobs),
                    )
                )  # fmt: skip
                games[i].play(move)
        return [(g.reward, r) for g, r in zip(games, recorded, strict=True)]


def one_run(engine: Engine, base: str, lag: int, seed: int, args: argparse.Namespace) -> dict[str, float]:
    began = time.perf_counter()
    arena = Arena(engine, base)
    random = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    line = engine.new_line()
    versions = {0: line.weights}
    rewards = []
    opening = 0
    for step in range(args.steps):
        prepared: list[PreparedGroup] = []
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
            prepared.append(prepare(scored, [s for _, e in part for s in build(e[0].trajectory, e)]))
        if prepared:
            indices = [i for i, group in enumerate(prepared) for _ in group.sequences]
            line = engine.step(line, examples(prepared, engine.config), indices).line
        versions[step + 1] = line.weights
    held_out = [opening_seed("val", n) for n in range(args.games)]
    final = [
        r for r, _ in arena.play(held_out, line.weights, args.steps, torch.Generator().manual_seed(1234))
    ]
    return {
        "reward": statistics.mean(final),
        "standard_error": float(np.std(final, ddof=1) / np.sqrt(len(final))),
        "last_training_reward": statistics.mean(rewards[-4:]),
        "first_training_reward": rewards[0],
        "seconds": time.perf_counter() - began,
    }


def table(runs: dict[str, dict[str, Any]], lags: list[int], corrections: list[str]) -> str:
    """Mean over seeds and its spread, as a Markdown table."""
    lines = [
        "| correction | " + " | ".join(f"lag {lag}" for lag in lags) + " |",
        "| --- |" + " --- |" * len(lags),
    ]
    for correction in corrections:
        cells = []
        for lag in lags:
            # Without lag every ratio is 1 and the corrections are one computation.
            name = correction if lag else CORRECTIONS[0]
            found = [r["reward"] for k, r in runs.items() if k.startswith(f"{name}/{lag}/")]
            spread = f" ± {statistics.stdev(found):.3f}" if len(found) > 1 else ""
            cells.append(f"{statistics.mean(found):.3f}{spread}" if found else "–")
        lines.append(f"| {correction} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="examples/tictactoe/model")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--groups", type=int, default=8, help="groups per step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--games", type=int, default=500, help="held-out games")
    parser.add_argument(
        "--config", default="examples/tictactoe/journeyman.toml", help="whose [trainer] is used"
    )
    parser.add_argument("--learning-rate", type=float, default=None)
    parser.add_argument("--loss-type", default=None)
    parser.add_argument("--lags", type=int, nargs="*", default=[0, 1, 2, 4, 8])
    parser.add_argument("--corrections", nargs="*", default=list(CORRECTIONS), choices=CORRECTIONS)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no run after so many; 0: no limit")
    parser.add_argument("--out", default="benchmarks/results/staleness.json")
    args = parser.parse_args()
    out = Path(args.out)
    given = load(args.config).trainer
    config = msgspec.structs.replace(
        given, learning_rate=args.learning_rate or given.learning_rate, loss_type=args.loss_type or given.loss_type,
        threads=args.threads, max_staleness=10_000, check_sequences=0,
    )  # fmt: skip
    settings = {k: getattr(args, k) for k in ("steps", "groups", "group_size", "games")}
    settings |= {
        k: getattr(config, k) for k in ("learning_rate", "loss_type", "advantage_scaling", "correction_max")
    }
    report: dict[str, Any] = {"settings": settings, "runs": {}}
    if out.exists() and (before := json.loads(out.read_text()))["settings"] == settings:
        report["runs"] = before["runs"]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        engine = Engine(args.base, config, Path(scratch))
        fresh = engine.weights()
        for seed in args.seeds:
            for lag in args.lags:
                for correction in args.corrections:
                    key = f"{correction}/{lag}/{seed}"
                    if key in report["runs"] or (lag == 0 and correction != CORRECTIONS[0]):
                        continue
                    if args.minutes and time.monotonic() - began > 60 * args.minutes:
                        break
                    engine.put(fresh)
                    engine.use(msgspec.structs.replace(config, sampler_correction=correction))
                    report["runs"][key] = one_run(engine, args.base, lag, seed, args)
                    print(key, {k: round(v, 4) for k, v in report["runs"][key].items()}, flush=True)
                    report["table"] = table(
                        report["runs"], sorted(set(args.lags)), list(CORRECTIONS)
                    ).splitlines()
                    out.parent.mkdir(parents=True, exist_ok=True)
                    out.write_text(json.dumps(report, indent=2) + "\n")
    print("\n".join(report.get("table", [])))


if __name__ == "__main__":
    main()
