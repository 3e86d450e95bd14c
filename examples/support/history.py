"""What the history of the run says: the customers' tickets, and which version answered how many."""

from __future__ import annotations

import contextlib
from pathlib import Path

import anyio
import anyio.to_thread

from examples.common import history, running
from store.reading.sql import NoStoreError

TICKETS = "SELECT DISTINCT task FROM trajectories WHERE outcome = 'masked' AND split = 'train' ORDER BY task"
ANSWERED_BY = """
SELECT policy_version, count(*) AS customers, avg(metrics['all_rules']) AS all_rules
FROM exchanges JOIN trajectories USING (project, trajectory) WHERE outcome = 'masked'
GROUP BY ALL ORDER BY min(started_at)
"""


async def recorded_tickets(run_dir: Path, written: set[str]) -> list[str]:
    """Return the tickets `written` by customers from the history, which has them all some seconds after their runs."""
    while True:
        with contextlib.suppress(NoStoreError):  # nothing is stored yet
            rows = await anyio.to_thread.run_sync(history.rows, run_dir, TICKETS)
            if written <= {row["task"] for row in rows}:
                return sorted(written)
        await anyio.sleep(running.LOOK_EVERY_S)


def answered_by(run_dir: Path) -> str:
    """Return a table of the versions that answered customers."""
    return history.ask(run_dir, ANSWERED_BY)
