"""Benchmark of learning from a teacher beside learning from rewards; writes benchmarks/results/teacher.json.

    python -m benchmarks.teacher [--seeds 5 6 7] [--games 1440] [--teacher FOLDER] [--out FILE]

Tic-tac-toe in one process, without a log and servers: the trainer's own engine takes the steps, and samples the games
from the same weights. First a teacher is trained by GRPO from the demo's base until it wins `TEACHER_WINS` of 2,000
games that no measurement uses, or `--teacher` names a PEFT adapter, such as `adapter` of a checkpoint of the demo. Then
each seed trains the base three times with equally many games: by GRPO in groups of `GROUP` games, by the teacher's
logprobs of the sampled tokens, and by the reverse KL divergence over its 20 most probable tokens; the two get no reward
and play each opening once. All are measured on the same held-out games.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.bench import RESULTS, machine, write_results
from examples.tictactoe.game import Game, describe, opening_seed
from examples.tictactoe.held_out import GAMES, prompt
from examples.tictactoe.make_model import MODEL_DIR
from pipeline.config import TrainerConfig, with_values
from trainer.batches.groups import Example
from trainer.batches.sequences import TokenSequence
from trainer.checkpoints.checkpoint import adapter_files, weights_of
from trainer.engine.engine import Engine
from trainer.engine.state import TrainState, Weights

BATCH, GROUP = 36, 6
"""Games of a step, and of a group."""
TEACHER_WINS, TEACHER_BATCH, TEACHER_STEPS = 0.84, 288, 120
TEACHER_RATE = 6e-3
SETTINGS: dict[str, Any] = {
    "optimizer.learning_rate": 1e-2, "optimizer.schedule": "linear", "lora.rank": 8, "lora.alpha": 16.0,
    "check_share": 0.0,
}  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "sampled": {"distill.weight": 1.0, "distill.divergence": "sampled"},
    "reverse_kl": {"distill.weight": 1.0, "distill.divergence": "reverse_kl"},
}
Recorded = tuple[Game, TokenSequence]


class Table:
    """Plays games with the adapter that is live in an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(MODEL_DIR))

    @torch.no_grad()
    def play(self, seeds: Sequence[str], step: int = 0) -> list[Recorded]:
        """Play games together, and return each with its tokens."""
        model: Any = self._engine.model.peft.get_base_model()
        games = [Game(seed) for seed in seeds]
        talks: list[list[dict[str, str]]] = [[] for _ in games]
        calls: list[list[tuple[int, float]]] = [
            [] for _ in games
        ]  # length of the prompt, logprob of the reply
        tokens: list[list[int]] = [[] for _ in games]
        while playing := [i for i, game in enumerate(games) if game.result is None]:
            for i in playing:
                talks[i].append({"role": "user", "content": describe(games[i].board)})
                tokens[i] = self._tokenizer(prompt(talks[i]), add_special_tokens=False).input_ids
            longest = max(len(tokens[i]) for i in playing)
            ids = torch.tensor([tokens[i] + [0] * (longest - len(tokens[i])) for i in playing])
            hidden = model.model(input_ids=ids).last_hidden_state
            ends = torch.tensor([len(tokens[i]) - 1 for i in playing])
            logprobs = model.lm_head(hidden[torch.arange(len(playing)), ends]).log_softmax(-1)
            for i, of_one, reply in zip(playing, logprobs, torch.multinomial(logprobs.exp(), 1), strict=True):
                calls[i].append((len(tokens[i]), float(of_one[reply])))
                tokens[i].append(int(reply))
                talks[i].append({"role": "assistant", "content": self._tokenizer.decode(reply)})
                games[i].play(talks[i][-1]["content"])
        return [
            (g, _sequence(g.seed, ids, of_game, step))
            for g, ids, of_game in zip(games, tokens, calls, strict=True)
        ]

    def wins(self, split: str, games: int) -> float:
        """Share of won games, of the first `games` openings of a split."""
        torch.manual_seed(1)
        parts = [range(first, min(first + 250, games)) for first in range(0, games, 250)]
        played = [game for part in parts for game, _ in self.play([opening_seed(split, n) for n in part])]
        return sum(game.result == "win" for game in played) / games


def _sequence(name: str, ids: Sequence[int], calls: Sequence[tuple[int, float]], step: int) -> TokenSequence:
    size = len(ids)
    mask, logprobs = np.zeros(size, np.bool_), np.full(size, np.nan, np.float32)
    for at, logprob in calls:
        mask[at], logprobs[at] = True, logprob
    steps, ones = np.full(size, step, np.int32), np.ones(size, np.float32)
    return TokenSequence(name, np.array(ids, np.int32), mask, logprobs, steps, ones)


def grpo(table: Table, openings: Iterator[str], batch: int, step: int) -> tuple[list[Example], list[int]]:
    """A batch in groups of one opening each, and the group of each game."""
    seeds = [seed for _ in range(batch // GROUP) for seed in [next(openings)] * GROUP]
    played, groups = table.play(seeds, step), [i // GROUP for i in range(batch)]
    rewards = np.array([game.reward for game, _ in played]).reshape(-1, GROUP)
    spread = rewards.std(1, ddof=1, keepdims=True) + 1e-4
    advantages = ((rewards - rewards.mean(1, keepdims=True)) / spread).ravel().tolist()
    return [Example(s, a) for (_, s), a in zip(played, advantages, strict=True)], groups


def taught(
    engine: Engine, table: Table, teacher: Weights, openings: Iterator[str], step: int
) -> tuple[list[Example], list[int]]:
    """A batch of single games with what the teacher says of their tokens, and no reward."""
    plain = [Example(s, 0.0) for _, s in table.play([next(openings) for _ in range(BATCH)], step)]
    groups = list(range(BATCH))
    with engine.model.with_adapter(teacher):
        said = engine.passes.teachings(plain, groups)
    return [Example(e.sequence, 0.0, teaching=said[i]) for i, e in enumerate(plain)], groups


def openings_of(split: str, seed: int) -> Iterator[str]:
    """The training games of a seed."""
    number = 0
    while True:
        yield opening_seed(split, number, seed)
        number += 1


def new_engine(seed: int, steps: int, scratch: Path, **settings: Any) -> tuple[Engine, TrainState]:
    """The base with an adapter that changes nothing."""
    torch.manual_seed(seed)
    values = SETTINGS | {"max_steps": steps, "seed": seed} | settings
    engine = Engine(str(MODEL_DIR), with_values(TrainerConfig(), values), scratch)
    return engine, engine.initial_state()


def train_teacher(scratch: Path) -> tuple[Weights, int]:
    """The adapter of the first policy that wins `TEACHER_WINS`, and the games that it took."""
    engine, state = new_engine(0, TEACHER_STEPS, scratch, **{"optimizer.learning_rate": TEACHER_RATE})
    table, openings = Table(engine), openings_of("teacher", 0)
    for step in range(TEACHER_STEPS):
        engine.model.load_adapter(state.weights)
        state = engine.step(state, *grpo(table, openings, TEACHER_BATCH, step)).state
        if step % 10 == 9:
            engine.model.load_adapter(state.weights)
            wins = table.wins("teacher/check", GAMES)
            print(f"teacher: {(step + 1) * TEACHER_BATCH} games, wins {wins:.3f}", flush=True)
            if wins >= TEACHER_WINS:
                return state.weights, (step + 1) * TEACHER_BATCH
    raise SystemExit(f"no policy of {TEACHER_STEPS} steps wins {TEACHER_WINS}; give one with --teacher")


def arm(name: str, seed: int, games: int, teacher: Weights, scratch: Path, held_out: int) -> dict[str, Any]:
    """Train the base in one way, and measure it half-way and at the end."""
    steps = games // BATCH
    engine, state = new_engine(seed, steps, scratch, **ARMS[name])
    table, openings, wins = Table(engine), openings_of("train", seed), {}
    torch.manual_seed(seed)
    began = time.monotonic()
    for step in range(steps):
        engine.model.load_adapter(state.weights)
        torch.manual_seed(1000 * seed + step)
        batch = (
            grpo(table, openings, BATCH, step)
            if name == "grpo"
            else taught(engine, table, teacher, openings, step)
        )
        state = engine.step(state, *batch).state
        if step + 1 in (steps // 2, steps):
            engine.model.load_adapter(state.weights)
            wins[(step + 1) * BATCH] = table.wins("val", held_out)
    print(f"seed {seed}, {name}: {wins}", flush=True)
    return {"wins_after_games": wins, "seconds": time.monotonic() - began}


def run(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The whole comparison."""
    about, taken = machine(), None
    if args.teacher is None:
        teacher, taken = train_teacher(scratch)
    else:
        files = {p.name: p.read_bytes() for p in args.teacher.iterdir() if p.is_file()}
        teacher = weights_of(files)
    engine, state = new_engine(0, 1, scratch)
    if args.save is not None:
        args.save.mkdir(parents=True, exist_ok=True)
        for file, content in adapter_files(teacher, engine.model.lora, str(MODEL_DIR)).items():
            (args.save / file).write_bytes(content)
    wins = {}
    for who, weights in (("base", state.weights), ("teacher", teacher)):
        engine.model.load_adapter(weights)
        wins[who] = Table(engine).wins("val", args.held_out)
    seeds = {
        str(seed): {name: arm(name, seed, args.games, teacher, scratch, args.held_out) for name in ARMS}
        for seed in args.seeds
    }
    half = NormalDist().inv_cdf(0.975) * (0.25 / args.held_out) ** 0.5
    return {
        **about, "games": args.games, "games_per_step": BATCH, "held_out_games": args.held_out, "teacher_games": taken,
        "wins": wins, "largest_half_interval_95": half, "seeds": seeds,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.teacher", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[5, 6, 7])
    parser.add_argument("--games", type=int, default=40 * BATCH, help="training games of each way")
    parser.add_argument("--held-out", type=int, default=GAMES, help="games that measure a policy")
    parser.add_argument("--teacher", type=Path, help="folder of the teacher's adapter")
    parser.add_argument("--save", type=Path, help="folder that the teacher's adapter is written to")
    parser.add_argument("--out", type=Path, default=RESULTS / "teacher.json")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        write_results(args.out, run(args, Path(scratch)))


if __name__ == "__main__":
    main()
