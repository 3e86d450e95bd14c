"""Crash points: places in the code where a test can kill the process.

    JOURNEYWORK_CRASH="store.after_commit:3" python -m store …     # dies when it reaches the point for the third time

Without the variable, `point` does nothing. With it, the process gets SIGKILL: no `finally` block runs and nothing is
flushed. The crash tests draw from the table below; only points in it can be named.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "JOURNEYWORK_CRASH"

POINTS: dict[str, str] = {
    "broker.before_publish": "an event is created and not published",
    "broker.after_publish": "the server has acknowledged an event, the publisher has not read the acknowledgement",
    "broker.after_claim": "a large event is in the object store, its claim check is not in the log",
    "broker.before_ack": "the work on a delivery is done, its acknowledgement is not sent",
    "broker.after_ack": "the acknowledgement of a delivery is sent",
    "store.before_write": "events are delivered, no file is begun",
    "store.before_commit": "a file is written and durable, no commit names it",
    "store.after_commit": "a commit names a file, the commit is not synced and nothing is acknowledged",
    "store.between_tags": "one tag of a batch is committed, the next is not",
    "store.before_ack": "all commits of a batch are durable, none of its events is acknowledged",
    "store.half_acked": "half of a batch's events are acknowledged",
    "store.after_ack": "all of a batch's events are acknowledged",
    "store.compacted": "a merge of files is committed, and the files that were merged still exist",
    "store.checkpointed": "a checkpoint of a table is written and not synced, the journal before it is not cleaned up",
    "broker.before_upload": "an object is created and not uploaded",
    "gateway.before_answer": "an exchange or a signal is recorded, its answer is not sent to the client",
    "sampler.before_rename": "an adapter is unpacked under its temporary name",
    "sampler.after_rename": "an adapter's folder has its final name, it is not loaded into vLLM",
    "sampler.adapter_loaded": "an adapter is in vLLM, `policy.loaded` is not published",
    "judge.timer_set": "a group's deadline is set, its first trajectory is not acknowledged",
    "judge.feedback_timer_set": "the end of the waiting for feedback is set, what closed the group is not acknowledged",
    "judge.teacher_answered": "a teacher's answer about a run is on the log, the run's group is not",
    "judge.healing_compared": "a correction is judged and the scores are on the log, the correction is not",
    "judge.before_publish": "a group is scored, its event is not published",
    "judge.after_publish": "a group's event is on the log, the trajectory that closed it is not acknowledged",
    "trainer.before_checkpoint": "a step is computed, nothing of it is on disk",
    "trainer.before_rename": "a checkpoint is written and durable under its temporary name",
    "trainer.after_rename": "a checkpoint has its final name, its folder is not synced",
    "trainer.after_checkpoint": "the checkpoint is on disk, the adapter is not uploaded",
    "trainer.between_uploads": "the adapter is uploaded, the training state is not",
    "trainer.after_upload": "the adapter is uploaded, `policy.checkpoint` is not published",
    "trainer.after_publish": "`policy.checkpoint` is published, its groups are not acknowledged",
    "decide.before_publish": "results decide, the decision is not sent to the gateway",
    "decide.after_publish": "the gateway has answered to a decision, the watcher has not gone on",
    "erase.planned": "what an erasure reaches is written down, nothing is deleted",
    "erase.message_deleted": "a message of an erasure is overwritten on the log, others are not",
    "erase.log_done": "the log holds no message of an erasure, the lake holds its rows",
    "erase.file_replaced": "a file of the lake is replaced by one without the erased rows, and still exists",
    "erase.lake_done": "log and lake hold nothing of an erasure, its receipt is not published",
    "erase.receipt": "the receipt of an erasure is published, what was written down about it still exists",
}
"""Each crash point: what is done by then and what is not."""


_name, _left = "", 0
"""The armed point, and how often the process may still reach it; the last time ends it."""


def _die_at(name: str) -> None:
    """Kill the process if `name` is the armed point and its count is reached."""
    global _left
    if name != _name:
        return
    _left -= 1
    if _left <= 0:
        os.kill(os.getpid(), signal.SIGKILL)


def _do_nothing(name: str) -> None:
    """Do nothing: no crash point is armed."""


point = _do_nothing
"""`point(name)`: kill the process if this point is armed and its count is reached. Call it as `crash.point`."""


def arm(where: str) -> None:
    """Arm a point: `"name:count"` kills the process when it reaches the point for the count-th time; an empty text
    disarms.

    Raises `ValueError` for an unknown point."""
    global _name, _left, point
    _name, _, count = where.partition(":")
    if _name and _name not in POINTS:
        raise ValueError(f"{_name!r} is no crash point; choose one of {', '.join(POINTS)}")
    _left = int(count or 1)
    point = _die_at if _name else _do_nothing


arm(os.environ.get(VARIABLE, ""))
