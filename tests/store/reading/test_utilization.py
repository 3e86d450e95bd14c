"""The view `utilization`, and what the dashboard says of it."""

import contextlib
from pathlib import Path

from pipeline.config import Config
from pipeline.events import Event
from store.showing.pages.history import History
from store.showing.pages.overview import with_curves
from tests.kits.events import checkpoint
from tests.store.kit import exchange, fill
from tests.store.reading.test_sql import rows

SECOND = 1_000_000


def test_who_waited_for_whom_between_two_steps(tmp_path: Path) -> None:
    def call(run: str, began: int, ended: int) -> Event:
        return exchange(run, 0, 0, started_at=began * SECOND, at=ended * SECOND)

    fill(
        tmp_path,
        checkpoint(1, started_at=5 * SECOND, at=10 * SECOND),
        call("a", 11, 15),
        call("b", 12, 20),  # the union of both is 9 s
        checkpoint(2, started_at=15 * SECOND, at=20 * SECOND),
        checkpoint(3, started_at=19 * SECOND, at=24 * SECOND),  # it begins before the step before is published
        call("c", 24, 25),
        checkpoint(4, started_at=26 * SECOND, at=34 * SECOND),
    )
    found = rows(tmp_path, "SELECT step, seconds, training, sampling, bound_by FROM utilization ORDER BY step")
    assert found == [(2, 10.0, 0.5, 0.9, "sampling"), (3, 4.0, 1.0, 0.0, "training"), (4, 10.0, 0.8, 0.1, "agents")]
    with contextlib.closing(History(Config(run_dir=str(tmp_path)))) as history:
        page = with_curves(history, {})
    assert [(row["step"], row["sampling"], row["training"]) for row in page["utilization"]] == [
        (step, sampling, training) for step, _, training, sampling, _ in found
    ]
    assert page["summary"]["sentences"][-1] == (
        "Bound by agents: in the last 3 steps, servers answered calls for 42% of the time and the trainer trained "
        "for 71%."
    )
