"""The queries of the demo's report find what they are for, and nothing in a sound history."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from examples.common.invariants import NEVER, counting
from pipeline.events import (
    CheckpointPublished,
    Event,
    ExchangeRecorded,
    GroupScored,
    Member,
    TrajectoryCompleted,
    TrajectoryOpened,
    pack_logprobs,
    pack_seqs,
)
from store.reading import sql
from tests.kits import events
from tests.store.kit import exchange, fill

START = 1_800_000_000_000_000
"""Microseconds."""


def call(run: str, seq: int, step: int, begin: int, **more: Any) -> ExchangeRecorded:
    """A call of ten seconds that begins `begin` seconds after the start."""
    at = START + begin * 1_000_000
    values = {"group": "train-0", "replica": "r0", "started_at": at, "at": at + 10_000_000}
    return exchange(run, seq, step, **(values | more))


def checkpoint(step: int, group: str) -> CheckpointPublished:
    more = {"groups": (group,), "group_seqs": pack_seqs([1]), "adapter_sha256": f"s{step}"}
    return events.checkpoint(step, at=START + 30_000_000, **more)


def history() -> dict[str, Event]:
    """A sound history: two runs of two calls, a group, a checkpoint and its load; one more call by the checkpoint."""
    made: dict[str, Event] = {}
    for run in ("t0", "t1"):
        made[f"open {run}"] = TrajectoryOpened(project="p", trajectory=run, model="m", group="train-0", at=START)
        for seq in range(2):
            made[f"call {run} {seq}"] = call(run, seq, 0, 1 + 10 * seq)
        made[f"complete {run}"] = TrajectoryCompleted(
            project="p", trajectory=run, model="m", group="train-0", exchanges=2, reward=1.0, at=START + 25_000_000
        )
    members = tuple(Member(trajectory=t, reward=r, exchanges=2) for t, r in (("t0", 1.0), ("t1", 0.0)))
    made["scored"] = GroupScored(project="p", group="train-0", model="m", judge="j", members=members)
    made["checkpoint"] = checkpoint(1, "train-0")
    made["loaded"] = events.loaded(1, adapter_sha256="s1", at=START + 31_000_000)
    made["open t2"] = TrajectoryOpened(project="p", trajectory="t2", model="m", group="train-1", at=START + 32_000_000)
    made["call t2 0"] = call("t2", 0, 1, 33, group="train-1")
    return made


def findings(folder: Path, events: dict[str, Event], part: str = "") -> dict[str, int]:
    """What the queries find whose name has this part, with its count."""
    fill(folder, *events.values())
    asked = counting({name: query for name, query in NEVER.items() if part in name})
    with sql.connect(folder) as connection:
        return {name: count for name, count in connection.sql(asked).fetchall() if count}


def test_a_sound_history_has_no_findings(tmp_path: Path) -> None:
    assert findings(tmp_path, history()) == {}


def test_an_empty_history_has_no_findings(tmp_path: Path) -> None:
    assert findings(tmp_path, {"open": history()["open t0"]}) == {}


FAULTS: dict[str, tuple[str, Event | dict[str, Any]]] = {
    "an older version than a call": ("call t2 1", call("t2", 1, 0, 50, group="train-1")),
    "an older version after a newer one": ("call t2 1", call("t2", 1, 0, 40, group="train-1")),
    "before the version was published": ("call t2 0", {"at": START + 29_000_000}),
    "at a server that had not loaded": ("call t2 0", {"replica": "r9"}),
    "not that of its model and step": ("call t2 0", {"policy_version": "m@7"}),
    "a run trained in two checkpoints": ("again", checkpoint(2, "train-0")),
    "a call trained in two checkpoints": ("again", checkpoint(2, "train-0")),
    "an outside model answered, with tokens": ("call t0 0", {"policy_version": "outside:master", "step": -1}),
    "did not end and was trained": ("call t0 0", {"status": "cancelled"}),
    "parent is not the step before": ("checkpoint", {"parent": "m@5"}),
    "another adapter than the published": ("loaded", {"adapter_sha256": "other"}),
    "changes no logprob": ("loaded", {"probe_delta": 0.0}),
    "ended before it began": ("call t0 0", {"at": START}),
    "of a run that had been completed": ("call t0 1", {"started_at": START + 26_000_000, "at": START + 27_000_000}),
    "another number of logprobs": ("call t0 0", {"logprobs": pack_logprobs([-0.5])}),
    "a logprob above 0": ("call t0 0", {"logprobs": pack_logprobs([0.5, float("nan")])}),
    "outside of -1 to 1": ("scored", {"members": (Member(trajectory="t0", reward=9.0, exchanges=2),)}),
    "not numbered from 0": ("call t0 1", {"seq": 5}),
    "two calls of a run with one number": ("call t0 0 again", call("t0", 0, 0, 1)),
}
"""By a part of the finding's name: the event that has the fault, and what is changed in it, or the event itself."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(tmp_path: Path, name: str) -> None:
    events = history()
    key, fault = FAULTS[name]
    events[key] = msgspec.structs.replace(events[key], **fault) if isinstance(fault, dict) else fault
    assert findings(tmp_path, events, part=name)
