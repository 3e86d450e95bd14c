"""The curves and tables of a filled history in a real Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pipeline.config import Config, ModelConfig, UiConfig
from tests.kits.services import service
from tests.store.kit import checkpoint, fill, scored
from tests.store.showing.dashboard import browser as browsers

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(browsers.missing()), reason=browsers.missing()),
]
STEPS = 40
_COLUMNS = """canvas => {
    const { data, width, height } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const inked = [], coloured = [];
    for (let x = 0; x < width; x++) for (let y = 0; y < height; y++) {
        const [red, , blue, alpha] = data.slice(4 * (y * width + x), 4 * (y * width + x) + 4);
        if (alpha) inked.push(x);
        if (alpha > 200 && blue - red > 100) coloured.push(x);
    }
    return [Math.min(...inked), new Set(coloured).size / width];
}"""
"""The first column with ink, and the share of columns with the colour of a curve."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runs") / "here"
    made: list[Any] = []
    for step in range(1, STEPS + 1):
        metrics = {"loss": -7.654e-5 * step / STEPS} | ({"kl": 0.01 * step} if step % 10 == 1 else {})
        made += [
            scored(f"group-{step:032d}", {"a": 0.0, "b": 1.0}, {"first_step": step, "last_step": step},
                   task="Move the reservation to the first day after the fair that is still free. " * 3),
            checkpoint(step, metrics=metrics),
        ]  # fmt: skip
    fill(folder, made)
    config = Config(
        project="p", run_dir=str(folder), ui=UiConfig(port=0), models=(ModelConfig(name="m", base="base"),)
    )
    with service("store.showing.dashboard", config) as (_, line):
        yield msgspec.json.decode(line)["url"]


@pytest.fixture(scope="module")
def browser(url: str) -> Iterator[Browser]:
    with browsers.chromium() as opened:
        yield opened


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    context = browser.new_context(base_url=url, viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()


def test_values_in_some_steps_are_connected_and_labels_are_whole(page: Page) -> None:
    page.goto("/overview")
    for name in ("loss", "kl"):
        first, share = page.locator(f"[data-y='metrics.{name}'] canvas").evaluate(_COLUMNS)
        assert share > 0.4, name
        assert first > 0, name


def test_a_chart_says_that_it_is_loading(page: Page) -> None:
    held: list[Any] = []
    page.route("**/compare.json*", lambda route: held.append(route))
    chart = page.locator("[data-rows=curve]")
    page.goto("/compare")
    assert chart.inner_text() == "Loading …"
    assert chart.get_attribute("aria-busy") == "true"
    held[0].abort()
    page.wait_for_selector("[data-rows=curve]:not([aria-busy]) >> text=could not be loaded")


def test_a_step_is_chosen_and_opened_with_the_keyboard(page: Page) -> None:
    page.goto("/overview")
    chart = page.locator("[data-y='metrics.loss'][role=slider]")
    chart.focus()
    assert chart.get_attribute("aria-valuenow") == str(STEPS)
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    assert chart.get_attribute("aria-valuetext") == "step 2, Loss −3.827e−6"
    page.keyboard.press("Enter")
    page.wait_for_url("**/checkpoint/m@2")


@pytest.mark.parametrize("width", [390, 768])
def test_a_task_is_readable_on_a_small_screen(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto("/groups")
    cell = page.locator("td.text").first.bounding_box()
    assert cell is not None
    assert cell["width"] >= 240
    assert page.evaluate("document.documentElement.scrollHeight") < 60 * STEPS + 700
