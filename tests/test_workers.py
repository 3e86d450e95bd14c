"""Tests that share something costly share a worker of pytest-xdist."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def shared() -> None:
    pass


def test_what_a_module_shares_is_made_in_one_worker(request: pytest.FixtureRequest, shared: None) -> None:
    (group,) = request.node.iter_markers("xdist_group")
    assert group.args == ("tests/test_workers.py",)
    # pytest-xdist's scheduler knows node ids only.
    scheduled = getattr(request.config.option, "loadgroup", False)
    assert request.node.nodeid.endswith("@tests/test_workers.py") == scheduled


def test_what_is_alone_goes_to_any_worker(request: pytest.FixtureRequest) -> None:
    assert [*request.node.iter_markers("xdist_group")] == []
