"""A real Chromium for tests and pictures."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def missing() -> str:
    """Why there is no browser here; empty if there is one."""
    try:
        import playwright  # noqa: F401
    except ModuleNotFoundError:
        return "playwright is not installed: deploy/make-venv.sh cpu installs it"
    return "" if _path() else "no Chromium is installed: apt-get install chromium"


def _path() -> str | None:
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser. While it is open, this thread can run no event loop of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's own sandbox needs user namespaces, which containers lack; the pages are ours.
        options: dict[str, Any] = {"executable_path": _path(), "args": ["--no-sandbox", "--disable-gpu"]}
        browser = playwright.chromium.launch(**options)
        try:
            yield browser
        finally:
            browser.close()
