"""Tests that share something costly share a worker of pytest-xdist, and are not failed by one that broke it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.conftest import InferenceDouble
from tests.kits import shared_servers


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


def test_a_shared_server_that_ended_is_told_of_and_starts_again(tmp_path: Path) -> None:
    keeping = shared_servers.run(InferenceDouble(tmp_path))
    server = next(keeping)
    try:
        assert shared_servers.revive() == ""
        with (tmp_path / "vllm.log").open("a") as log:
            log.write("its last words")
        server.kill()
        teardown = shared_servers.Watch().pytest_runtest_teardown()
        next(teardown)
        with pytest.raises(
            pytest.fail.Exception, match=r"(?s)ended with status -9; .* ends:\n.*its last words"
        ):
            next(teardown)
        assert httpx.get(f"{server.url}/health").status_code == 200
    finally:
        list(keeping)
