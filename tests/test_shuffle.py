"""What the order of tests and their workers depend on: JOURNEYWORK_TEST_SHUFFLE shuffles the files, and tests that
share something costly share a worker."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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


@pytest.fixture(scope="module")
def shared() -> None:
    pass


def test_what_a_module_shares_is_made_in_one_worker(request: pytest.FixtureRequest, shared: None) -> None:
    (group,) = request.node.iter_markers("xdist_group")
    assert group.args == ("tests/test_shuffle.py",)
    # pytest-xdist's scheduler knows node ids only.
    scheduled = getattr(request.config.option, "loadgroup", False)
    assert request.node.nodeid.endswith("@tests/test_shuffle.py") == scheduled


def test_what_is_alone_goes_to_any_worker(request: pytest.FixtureRequest) -> None:
    assert [*request.node.iter_markers("xdist_group")] == []
