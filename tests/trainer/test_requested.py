"""Requested batches whose groups end while others come."""

from types import SimpleNamespace
from typing import Any

import msgspec

from pipeline.events import GroupScored, TrainingBatch
from pipeline.log.messages import Place
from trainer.batches.groups import AdmittedGroup
from trainer.requested import RequestedBatches

REQUEST = TrainingBatch(id="b", groups=("a", "c"), owner="alice")


def group(name: str, seq: int) -> AdmittedGroup:
    return AdmittedGroup(
        GroupScored(project="p", group=name, model="m", judge="j", members=(), batch=REQUEST), Place(seq, 0)
    )


async def test_a_batch_whose_groups_are_discarded_while_another_comes_goes_on() -> None:
    """The intake ended with a KeyError."""
    first, second = group("a", 1), group("c", 2)

    async def read(*_: Any, **__: Any) -> list[Any]:
        requested.settle(first.event)
        return []

    log: Any = SimpleNamespace(read=read, subjects=read)
    requested = RequestedBatches(log, "trainer", 60.0)
    await requested.begin(second.event)
    requested.add(REQUEST, second)
    complete = requested.take_complete()
    assert complete is not None
    assert [waiting.event.group for waiting in complete.groups] == ["c"]


async def test_a_batch_of_thousands_of_groups_asks_the_log_no_more_than_one_of_two() -> None:
    """The fault that was: it asked about each group, one after the other, and all other groups waited."""
    asked = []

    async def ask(*_: Any, **keys: Any) -> list[Any]:
        asked.append(keys)
        return []

    requested = RequestedBatches(SimpleNamespace(read=ask, subjects=ask), "trainer", 60.0)  # type: ignore[arg-type]
    many = msgspec.structs.replace(REQUEST, groups=tuple(f"g{n}" for n in range(4096)))
    await requested.begin(msgspec.structs.replace(group("g0", 1).event, batch=many))
    assert len(asked) == 2
