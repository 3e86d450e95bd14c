"""Stop points: places where a test may kill the process it runs in, as a power cut would.

    JOURNEYMAN_CRASH="store.after_rename:3" python -m store …     # dies at the third passage

Without the variable `point` does nothing. With it, the process gets SIGKILL: no `finally`, no flush, no goodbye. The table below
is what a crash matrix draws from; a point that is not in it can't be named.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "JOURNEYMAN_CRASH"

POINTS: dict[str, str] = {
    "broker.before_publish": "an event is made, the broker has not seen it",
    "broker.after_publish": "the broker has acknowledged an event, the publisher does not know yet",
    "broker.after_claim": "a large event is in the object store, its claim check is not in the log",
    "broker.before_ack": "the work on a delivery is done, its acknowledgement is not sent",
    "broker.after_ack": "the acknowledgement of a delivery is sent",
    "store.before_write": "events are taken, no file is begun",
    "store.before_rename": "a file is written and durable under its temporary name",
    "store.after_rename": "a file has its name, its folder is not synced and nothing is acknowledged",
    "store.between_tags": "one tag of a part has its file, the next has not",
    "store.before_ack": "all files of a part are durable, none of its events is acknowledged",
    "store.half_acked": "half of a part's events are acknowledged",
    "store.after_ack": "all of a part's events are acknowledged",
    "store.compacted": "a compacted file is there, and so are the files it replaces",
    "store.half_removed": "some of the files that a compacted one replaces are gone",
    "broker.before_upload": "an object is made, the object store has not seen it",
    "gateway.before_answer": "an exchange is recorded, the agent has not got its answer",
    "gateway.before_rename": "an adapter is unpacked under its temporary name",
    "gateway.after_rename": "an adapter's folder has its name, vLLM has not been told of it",
    "gateway.adapter_loaded": "an adapter is in vLLM, `policy.loaded` is not published",
    "judge.before_publish": "a group is scored, its event is not published",
    "judge.after_publish": "a group's event is in the log, its trajectories are not acknowledged",
    "trainer.before_checkpoint": "a step is computed, nothing of it is on disk",
    "trainer.before_rename": "a checkpoint is written and durable under its temporary name",
    "trainer.after_rename": "a checkpoint has its name, its folder is not synced",
    "trainer.after_checkpoint": "the checkpoint is on disk, the adapter is not uploaded",
    "trainer.after_upload": "the adapter is uploaded, `policy.checkpoint` is not published",
    "trainer.after_publish": "`policy.checkpoint` is published, its groups are not acknowledged",
}
"""Every stop point: what is done by then and what is not."""


_name, _left = "", 0


def _die_at(name: str) -> None:
    global _left
    if name != _name:
        return
    _left -= 1
    if _left <= 0:
        os.kill(os.getpid(), signal.SIGKILL)


def _pass(name: str) -> None:
    """Nothing is armed."""


point = _pass
"""`point(name)`: die here if this is where it was asked for. Call it as `crash.point`."""


def arm(where: str) -> None:
    """`"name:count"`: die at the count-th passage of that point; empty: never. Raises `ValueError` for no known point."""
    global _name, _left, point
    _name, _, count = where.partition(":")
    if _name and _name not in POINTS:
        raise ValueError(f"{_name!r} is no stop point; there are: {', '.join(POINTS)}")
    _left = int(count or 1)
    point = _die_at if _name else _pass


arm(os.environ.get(VARIABLE, ""))
