"""Reading the calls of waiting groups."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.events import GroupScored, Member
from pipeline.log.messages import Place
from pipeline.sampling import Defaults
from tests.trainer.kit import exchange
from trainer.batches.groups import TrainingGroup
from trainer.batches.histories import Histories

pytestmark = pytest.mark.anyio


async def test_the_requests_of_a_groups_runs_are_not_in_memory_together() -> None:
    """Each request repeats its conversation, so that they are much larger than the tokens."""

    async def read(_: Any, *, trajectory: str, **__: Any) -> list[Any]:
        request = b'{"messages": [], "note": "%b"}' % (b"x" * 1_000_000)
        calls = [
            exchange(trajectory, call, [call, 5], [7, 8], request=request + b" " * call) for call in range(3)
        ]
        return [SimpleNamespace(event=call) for call in calls]

    members = tuple(Member(trajectory=f"t{n}", reward=float(n), exchanges=3) for n in range(30))
    group = TrainingGroup(
        GroupScored(project="p", group="g", model="m", judge="j", members=members), Place(1, 0)
    )
    broker: Any = SimpleNamespace(read=read)
    tracemalloc.start()
    try:
        assert await Histories(broker, Defaults(), mask_truncated=False).read(group) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(group.sequences or ()) == 90
    assert peak < 20_000_000, peak
