"""A made history in the store's tables: trajectories of four calls, in groups of eight, eight groups a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from store.lake import columns
from store.lake.lake import Lake, lake_in

PER_FILE = 25_000
CALLS, MEMBERS, GROUPS_A_STEP = 4, 8, 8
PROMPT, SAMPLED = 40, 10
BASE_US = 1_700_000_000_000_000
APART_US = 800_000
"""Time between two trajectories: a million takes nine days."""


def make_history(run_dir: Path, trajectories: int) -> None:
    """A store with so many trajectories of 4 calls, in groups of 8, 8 groups a step, scored by a judge."""
    lake, rng = lake_in(run_dir / "store"), np.random.default_rng(1)
    for first in range(0, trajectories, PER_FILE):
        count = min(PER_FILE, trajectories - first)
        _rollouts(lake, first, count, rng)
        _groups(lake, first, count)
        _steps(lake, first, count)
    Path(lake.storage.root, "made").write_text(str(trajectories))


def _rollouts(lake: Lake, first: int, count: int, rng: np.random.Generator) -> None:
    numbers = np.arange(first, first + count)
    began = BASE_US + numbers * APART_US
    steps = numbers // (MEMBERS * GROUPS_A_STEP)
    names, groups = [f"t{i:07d}" for i in numbers], [f"g{i // MEMBERS:06d}" for i in numbers]
    tasks = [f"task {i // MEMBERS % 500}" for i in numbers]
    common: dict[str, Any] = {
        "project": ["p"] * count,
        "model": ["m"] * count,
        "trajectory": names,
        "group": groups,
        "task": tasks,
        "attempt": numbers % MEMBERS,
        "split": ["train"] * count,
        "traceparent": [""] * count,
        "v": np.ones(count, int),
    }
    opened = {**common, "log_seq": numbers * 6 + 1, "log_at": began, "at": began}
    put_rows(lake, "rollout.opened", opened, count)
    ended = began + 2_000_000
    completed = {
        **common,
        "log_seq": numbers * 6 + 6,
        "log_at": ended,
        "at": ended,
        "opened_at": began,
        "outcome": ["scored"] * count,
        "reward": rng.random(count).round(3),
        "exchanges": np.full(count, CALLS),
        "prompt_tokens": np.full(count, CALLS * PROMPT),
        "sampled_tokens": np.full(count, CALLS * SAMPLED),
        "first_step": steps,
        "last_step": steps,
    }
    put_rows(lake, "rollout.completed", completed, count)
    of = np.repeat(numbers, CALLS)
    turns, rows = np.tile(np.arange(CALLS), count), count * CALLS
    seqs = of * 6 + 2 + turns
    at = BASE_US + of * APART_US + turns * 400_000
    words = np.array([f"word{i}" for i in range(2_000)])
    asked = pa.array(
        [json.dumps({"messages": [{"role": "user", "content": " ".join(rng.choice(words, 40))}]}) for _ in range(2_000)]
    )
    said = pa.array(
        [
            json.dumps({"choices": [{"message": {"role": "assistant", "content": " ".join(rng.choice(words, 10))}}]})
            for _ in range(2_000)
        ]
    )
    which = rng.integers(0, 2_000, rows)
    exchanges: dict[str, Any] = {
        "log_seq": seqs,
        "log_at": at,
        "at": at,
        "started_at": at - 300_000,
        "project": ["p"] * rows,
        "model": ["m"] * rows,
        "traceparent": [""] * rows,
        "v": np.ones(rows, int),
        "seq": turns,
        "trajectory": np.repeat(names, CALLS),
        "group": np.repeat(groups, CALLS),
        "choice": np.zeros(rows, int),
        "policy_version": [f"m@{i}" for i in np.repeat(steps, CALLS)],
        "step": np.repeat(steps, CALLS),
        "request": asked.take(pa.array(which)),
        "response": said.take(pa.array(which)),
        "status": ["complete"] * rows,
        "prompt_ids": _lists(rng.integers(0, 150_000, rows * PROMPT, dtype=np.int32), PROMPT),
        "sampled_ids": _lists(rng.integers(0, 150_000, rows * SAMPLED, dtype=np.int32), SAMPLED),
        "logprobs": _lists(-rng.random(rows * SAMPLED, dtype=np.float32), SAMPLED),
        "forced": pa.array([[]] * rows, pa.list_(pa.int8())),
        "side_call": np.zeros(rows, bool),
    }
    put_rows(lake, "rollout.exchange", exchanges, rows)


def _lists(values: Any, each: int) -> pa.ListArray:
    return pa.ListArray.from_arrays(np.arange(0, len(values) + 1, each, dtype=np.int32), values)


def _groups(lake: Lake, first: int, count: int) -> None:
    groups = np.arange(first // MEMBERS, (first + count) // MEMBERS)
    rows = len(groups)
    at = BASE_US + groups * MEMBERS * APART_US + 10_000_000
    names = [[f"t{g * MEMBERS + k:07d}" for k in range(MEMBERS)] for g in groups]
    made: dict[str, Any] = {
        "log_seq": groups + 1,
        "log_at": at,
        "at": at,
        "project": ["p"] * rows,
        "model": ["m"] * rows,
        "group": [f"g{g:06d}" for g in groups],
        "judge": ["j"] * rows,
        "branch": ["main"] * rows,
        "split": ["train"] * rows,
        "task": [f"task {g % 500}" for g in groups],
        "members": [
            [
                {
                    "trajectory": name,
                    "reward": (k + g % 5) / 12,
                    "outcome": "scored",
                    "split": "train",
                    "exchanges": CALLS,
                    "first_step": g // GROUPS_A_STEP,
                    "last_step": g // GROUPS_A_STEP,
                }
                for k, name in enumerate(own)
            ]
            for g, own in zip(groups.tolist(), names, strict=True)
        ],
        "verdicts": [
            [
                {
                    "judge_model": "judge/1",
                    "rubric": "general",
                    "order": own,
                    "cost_usd": 0.002,
                    "latency_s": 1.5,
                    "attempts": 1,
                    "scores": [
                        {"trajectory": name, "score": k / 8, "call": -1, "explanation": "It does what it was asked."}
                        for k, name in enumerate(own)
                    ],
                }
            ]
            for own in names
        ],
    }
    put_rows(lake, "group.scored", made, rows)


def _steps(lake: Lake, first: int, count: int) -> None:
    a_step = MEMBERS * GROUPS_A_STEP
    steps = np.arange(max(1, first // a_step), (first + count) // a_step)
    rows = len(steps)
    at = BASE_US + steps * a_step * APART_US
    made: dict[str, Any] = {
        "log_seq": steps,
        "log_at": at,
        "at": at,
        "started_at": at - 20_000_000,
        "project": ["p"] * rows,
        "model": ["m"] * rows,
        "step": steps,
        "version": [f"m@{s}" for s in steps],
        "parent": [f"m@{s - 1}" for s in steps],
        "branch": ["main"] * rows,
        "groups": [[f"g{(s - 1) * 8 + k:06d}" for k in range(8)] for s in steps],
        "group_seqs": [[(s - 1) * 8 + k + 1 for k in range(8)] for s in steps],
        "metrics": [[("loss", 1 / s), ("kl", s / 1e5), ("entropy", 1.0)] for s in steps.tolist()],
    }
    put_rows(lake, "policy.checkpoint", made, rows)


def put_rows(lake: Lake, tag: str, made: dict[str, Any], rows: int) -> None:
    """Write a file of `rows` rows of a tag from columns by name; columns that are not given are null."""
    schema = columns.arrow_schema(tag)
    arrays = [
        pa.array(made[f.name], f.type)
        if f.name in made and not isinstance(made[f.name], pa.Array)
        else made[f.name].cast(f.type)
        if f.name in made
        else pa.nulls(rows, f.type)
        for f in schema
    ]
    lake.table(tag).append(pa.Table.from_arrays(arrays, schema=schema))
