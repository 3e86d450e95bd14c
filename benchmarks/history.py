"""A made history in the store's tables: trajectories of four calls, in groups of eight, eight groups a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.events import (
    AnyEvent,
    CheckpointPublished,
    ExchangeRecorded,
    GroupScored,
    TrajectoryCompleted,
    TrajectoryOpened,
    pack_logprobs,
    pack_seqs,
    wire_name,
)
from store.lake import columns
from store.lake.lake import Lake, lake_in
from tests.kits import events
from tests.store.kit import scored, verdict

PER_FILE = 25_000
CALLS, MEMBERS, GROUPS_A_STEP = 4, 8, 8
PROMPT, SAMPLED = 40, 10
BASE_US = 1_700_000_000_000_000
APART_US = 800_000
"""Time between two trajectories: a million takes nine days."""
_TEXTS = 2_000
"""Different requests and replies."""


def make_history(run_dir: Path, trajectories: int) -> None:
    """A store with so many trajectories of 4 calls, in groups of 8, 8 groups a step, scored by a judge."""
    lake, rng = lake_in(run_dir / "store"), np.random.default_rng(1)
    words = np.array([f"word{i}" for i in range(_TEXTS)])
    requests = [_message("user", rng.choice(words, 40)) for _ in range(_TEXTS)]
    replies = [_message("assistant", rng.choice(words, 10)) for _ in range(_TEXTS)]
    texts = [
        (json.dumps({"messages": [sent]}).encode(), json.dumps({"choices": [{"message": said}]}).encode())
        for sent, said in zip(requests, replies, strict=True)
    ]
    for first in range(0, trajectories, PER_FILE):
        numbers = range(first, min(first + PER_FILE, trajectories))
        runs = [_run(number, float(rng.random())) for number in numbers]
        _append(lake, [opened for opened, _ in runs], [number * 6 + 1 for number in numbers])
        _append(lake, [completed for _, completed in runs], [number * 6 + 6 for number in numbers])
        for call in range(CALLS):
            calls = [_exchange(number, call, texts[rng.integers(_TEXTS)], rng) for number in numbers]
            _append(lake, calls, [number * 6 + 2 + call for number in numbers])
        groups = range(numbers.start // MEMBERS, numbers.stop // MEMBERS)
        _append(lake, [_group(group) for group in groups], [group + 1 for group in groups])
        steps = range(max(1, groups.start // GROUPS_A_STEP), groups.stop // GROUPS_A_STEP)
        _append(lake, [_step(step) for step in steps], steps)


def _append(lake: Lake, made: Sequence[AnyEvent], seqs: Sequence[int]) -> None:
    """Write events of one class as a file of their table."""
    if made:
        tag = wire_name(made[0])
        lake.table(tag).append(columns.table(tag, made, seqs, [e.at for e in made], [""] * len(made)))


def _message(role: str, words: Sequence[str]) -> dict[str, str]:
    return {"role": role, "content": " ".join(words)}


def _run(number: int, reward: float) -> tuple[TrajectoryOpened, TrajectoryCompleted]:
    """Return the opening and the completion of a trajectory."""
    group, step, began = number // MEMBERS, number // MEMBERS // GROUPS_A_STEP, BASE_US + number * APART_US
    name = f"t{number:07d}"
    common: dict[str, Any] = {"group": f"g{group:06d}", "task": f"task {group % 500}", "attempt": number % MEMBERS}
    completed = events.completed(
        name,
        **common,
        at=began + 2_000_000,
        opened_at=began,
        reward=round(reward, 3),
        exchanges=CALLS,
        prompt_tokens=CALLS * PROMPT,
        sampled_tokens=CALLS * SAMPLED,
        first_step=step,
        last_step=step,
    )
    return events.opened(name, **common, at=began), completed


def _exchange(number: int, call: int, text: tuple[bytes, bytes], rng: np.random.Generator) -> ExchangeRecorded:
    """Return a call of a trajectory with this request and response, and random tokens."""
    group, step = number // MEMBERS, number // MEMBERS // GROUPS_A_STEP
    at = BASE_US + number * APART_US + call * 400_000
    return events.exchange(
        f"t{number:07d}",
        call,
        rng.integers(0, 150_000, PROMPT).tolist(),
        rng.integers(0, 150_000, SAMPLED).tolist(),
        group=f"g{group:06d}",
        at=at,
        started_at=at - 300_000,
        policy_version=f"m@{step}",
        step=step,
        request=text[0],
        response=text[1],
        logprobs=pack_logprobs(-rng.random(SAMPLED)),
    )


def _group(group: int) -> GroupScored:
    """Return a scored group with its verdict."""
    names = {f"t{group * MEMBERS + k:07d}": k for k in range(MEMBERS)}
    words = dict.fromkeys(names, "It does what it was asked.")
    judged = verdict({name: k / 8 for name, k in names.items()}, words, cost_usd=0.002, latency_s=1.5)
    step, at = group // GROUPS_A_STEP, BASE_US + group * MEMBERS * APART_US + 10_000_000
    rewards = {name: (k + group % 5) / 12 for name, k in names.items()}
    member = {"exchanges": CALLS, "first_step": step, "last_step": step}
    return scored(f"g{group:06d}", rewards, member, task=f"task {group % 500}", at=at, verdicts=(judged,))


def _step(step: int) -> CheckpointPublished:
    """Return the checkpoint of a step that trained the groups of the step before."""
    at, groups = BASE_US + step * MEMBERS * GROUPS_A_STEP * APART_US, range((step - 1) * 8, step * 8)
    return events.checkpoint(
        step,
        at=at,
        started_at=at - 20_000_000,
        groups=tuple(f"g{group:06d}" for group in groups),
        group_seqs=pack_seqs([group + 1 for group in groups]),
        metrics={"loss": 1 / step, "kl": step / 1e5, "entropy": 1.0},
    )
