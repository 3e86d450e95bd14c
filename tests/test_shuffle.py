"""JOURNEYMAN_TEST_SHUFFLE shuffles the files; the tests of a file stay together and in order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import _shuffle_files


def shuffled(seed: str) -> list[tuple[str, int]]:
    items: list[Any] = [SimpleNamespace(path=Path(f), number=n) for f in "abcdefgh" for n in range(3)]
    _shuffle_files(items, seed)
    return [(item.path.name, item.number) for item in items]


def test_files_are_shuffled_whole_and_by_seed() -> None:
    one, other = shuffled("1"), shuffled("2")
    assert one == shuffled("1")
    assert one != other != sorted(other)
    assert sorted(one) == sorted(other)
    for order in (one, other):
        assert [n for _, n in order] == [0, 1, 2] * 8
        assert len({name for name, _ in order[:3]}) == 1
