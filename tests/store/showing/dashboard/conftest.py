"""A dashboard over a small history."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from pipeline.running.installations import SETTINGS, installation_settings
from store.showing.dashboard.server import _LISTS, Dashboard
from tests.kits.settings import with_values

URL = "http://127.0.0.1:8701"
LISTS = tuple(sorted({*_LISTS, "compare"} - {"numbers"}))
"""The pages that every page links."""
Open = Callable[..., TestClient]


@pytest.fixture
def run_dir(history: Path, tmp_path: Path) -> Path:
    """A run with its settings and a history of one step."""
    return copy_run(history, tmp_path / "runs" / "here")


def copy_run(history: Path, folder: Path) -> Path:
    shutil.copytree(history, folder)
    (folder / SETTINGS).write_text(
        f'project = "p"\nrun_dir = "{folder}"\nui.port = 0\n\n[[models]]\nname = "m"\nbase = "base"\n'
    )
    return folder


def client_of(run_dir: Path, host: str = "127.0.0.1", url: str = URL) -> TestClient:
    """A client of the run's dashboard, at `host`."""
    app = Dashboard(with_values(installation_settings(run_dir), {"ui.host": host})).app
    return TestClient(app, base_url=url, follow_redirects=False)


@pytest.fixture
def open_dashboard(run_dir: Path) -> Iterator[Open]:
    """Opens a client as `client_of`."""
    with ExitStack() as opened:
        yield lambda *args, **options: opened.enter_context(client_of(run_dir, *args, **options))


@pytest.fixture
def own_client(open_dashboard: Open) -> TestClient:
    """A client of the test's own run."""
    return open_dashboard()


@pytest.fixture(scope="module")
def client(history: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of one run for the tests of a module that change nothing."""
    with client_of(copy_run(history, tmp_path_factory.mktemp("runs") / "here")) as opened:
        yield opened
