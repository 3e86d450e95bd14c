"""The dashboard in a real Chromium: what people do with it, at the width of a phone and of a desktop, by mouse and by
keyboard, in dark and light, with axe-core over every page: on the phone in dark, on the desktop in light."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import pytest

from tests.store.showing.dashboard import browser as browsers
from tests.store.showing.dashboard.conftest import LISTS
from tests.store.showing.dashboard.living import GROUPS, MEMBERS, MODEL, Living, living

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(browsers.missing()), reason=browsers.missing()),
]
AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text("utf-8")
TRAJECTORY = f"{GROUPS[0].replace('/', '-')} run 2"
PAGES = (
    *LISTS,
    f"group/{quote(GROUPS[0], safe='')}",
    f"trajectory/{quote(TRAJECTORY)}",
    f"checkpoint/{MODEL}@1",
    f"checkpoint/{MODEL}@0",
    "sign-in",
    "nothing",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Living]:
    with living(tmp_path_factory.mktemp("living")) as found:
        yield found


@pytest.fixture(scope="module")
def browser(run: Living) -> Iterator[Browser]:
    with browsers.chromium() as opened:
        yield opened


@pytest.fixture
def page(browser: Browser, run: Living) -> Iterator[Page]:
    """A page of 1440 px at the overview. The test fails on an error in the browser's console."""
    context = browser.new_context(base_url=run.url, viewport={"width": 1440, "height": 900})
    opened = context.new_page()
    errors: list[str] = []
    opened.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto("/overview")
    yield opened
    context.close()
    assert not errors


def whole(opened: Page, path: str) -> None:
    """Open a page and wait until its curves are there."""
    opened.goto(f"/{path}")
    opened.wait_for_selector("[data-chart][aria-busy]", state="detached")


@pytest.mark.parametrize(("width", "colors"), [(360, "dark"), (1440, "light")])
def test_every_page_fits_and_axe_finds_nothing(
    browser: Browser, run: Living, width: int, colors: Literal["dark", "light"]
) -> None:
    # axe is put into the page by the test, which the pages' own policy forbids.
    size = {"width": width, "height": 900}
    context = browser.new_context(
        base_url=run.url,
        viewport=size,
        color_scheme=colors,
        bypass_csp=True,  # type: ignore[arg-type]
    )
    opened, found = context.new_page(), {}
    papers = set()
    for path in PAGES:
        whole(opened, path)
        opened.evaluate("document.querySelectorAll('details').forEach(folded => { folded.open = true })")
        opened.evaluate(AXE)
        violations = opened.evaluate("axe.run({resultTypes: ['violations'], preload: false})")["violations"]
        found[path] = [(v["id"], v["nodes"][0]["html"]) for v in violations]
        beyond = opened.evaluate("document.documentElement.scrollWidth - innerWidth")
        found[path] += [("wider than the screen", beyond)] if beyond > 0 else []
        papers.add(opened.evaluate("getComputedStyle(document.body).backgroundColor"))
    context.close()
    assert not {path: what for path, what in found.items() if what}
    assert [sum(map(int, re.findall(r"\d+", paper))) < 200 for paper in papers] == [colors == "dark"]


def test_curves_are_drawn_and_told(page: Page) -> None:
    page.wait_for_selector("[data-rows=curve] canvas")
    label = page.locator("[data-rows=curve]").get_attribute("aria-label") or ""
    assert re.fullmatch(r"Mean reward by policy step; training from [\d.]+ to [\d.]+", label), label
    assert page.locator("text=could not be loaded").count() == 0
    page.select_option("#smoothing", "5")
    assert page.locator("[data-rows=curve] .u-legend .u-series:not(.edge)").count() == 2  # the step, the line
    page.locator("[data-rows=curve] .u-over").click()
    page.wait_for_url("**/groups?**step=0")
    assert page.locator("tbody tr").count() == len(GROUPS)


def test_a_lineage_is_followed_from_a_checkpoint_to_tokens_and_back(page: Page) -> None:
    page.click("nav >> text=Checkpoints")
    page.click(f"td >> text={MODEL}@1 >> nth=0")
    page.click(f"text={GROUPS[0]}")
    page.wait_for_url("**/group/**")
    assert page.locator(".members > li").count() == MEMBERS
    assert page.locator("#ends ~ .ends blockquote >> text=It wins.").count() == 1
    page.click(f".members >> text={TRAJECTORY}")
    page.wait_for_url("**/trajectory/**")
    assert page.locator(".call").count() == 2
    token = page.locator(".token[title]").first
    assert re.match(rf"id \d+, logprob -[\d.]+, {MODEL}@0$", token.get_attribute("title") or "")
    assert page.locator("pre >> text=<b>c0=o</b>").count() == 1  # the agent's text, not its markup
    page.click(f".lead >> text={MODEL}@1")
    page.wait_for_url("**/checkpoint/**")
    assert page.locator("h1").inner_text() == f"{MODEL}@1"


def test_a_group_is_scored(page: Page, run: Living) -> None:
    where = f"group/{quote(GROUPS[1], safe='')}"
    page.goto(f"/{where}")
    assert page.locator("input:visible").count() == 0
    page.click("text=Score the members yourself")
    page.fill("input[name^='score:'] >> nth=0", "0.75")
    page.fill("input[name^='comment:'] >> nth=0", "a good opening")
    page.click("text=Record the label")
    page.wait_for_url("**labeled=1")
    page.click("text=Score the members yourself")
    for number in range(MEMBERS):
        page.fill(f"input[name^='score:'] >> nth={number}", str(number / (MEMBERS - 1)))
    page.click("text=Record the label")
    page.wait_for_url(f"**labeled={MEMBERS}")
    run.until(f"{where}.json", lambda data: sum(len(m["signals"]) for m in data["members"]) == 1 + MEMBERS)
    page.goto(f"/{where}")
    assert page.locator("text=label: 0.75, a good opening").count() == 1
    assert page.locator("text=somebody, label: 1.00").count() == 1
    rows = run.until("judge.json", lambda data: data["agreement"])["agreement"]
    assert [(row["judge_model"], row["pairs"], row["share"]) for row in rows] == [("judge/1", 3, 0.0)]


def test_a_version_is_promoted_with_its_reason(page: Page, run: Living) -> None:
    run.until("decisions.json", lambda data: data["policies"][0]["version"] == f"{MODEL}@2")
    page.goto("/decisions")
    page.select_option("select[name=action]", "promote")
    versions = page.locator("select[name=version] option").all_inner_texts()
    assert versions == ["none", *(f"{MODEL}@{step}" for step in (2, 1, 0))]
    page.select_option("select[name=version]", f"{MODEL}@1")
    page.fill("input[name=reason]", "the second step plays worse")
    page.click("text=Decide >> nth=-1")
    said = page.wait_for_selector("[role=status], [role=alert]")
    assert said is not None
    assert "The decision is made" in said.inner_text()
    assert page.locator("h2").first.inner_text() == f"{MODEL} stands for {MODEL}@1"
    run.until("decisions.json", lambda data: data["rows"])
    page.goto("/overview")
    assert page.locator("td >> text=the second step plays worse").count() == 1
    page.goto(f"/checkpoint/{MODEL}@1")
    assert page.locator(f"text=Now {MODEL} stands for this version.").count() == 1


def test_the_keyboard_does_everything(page: Page) -> None:
    def focused(what: str) -> Any:
        return page.evaluate(f"(() => {{ const e = document.activeElement; return {what}; }})()")

    page.keyboard.press("Tab")
    assert focused("e.className") == "skip"
    box = page.locator(".skip").bounding_box()
    assert box is not None
    assert box["x"] >= 0  # it is seen while it has the focus
    page.keyboard.press("Enter")
    assert focused("e.id") == "content"
    page.goto("/groups")
    seen: list[str] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        assert focused("getComputedStyle(e).outlineStyle") == "solid"
        seen.append(focused("e.innerText || e.name || ''"))
        if seen[-1] == GROUPS[1]:
            break
    assert {"Overview", "Decisions", "task", "Show", GROUPS[1]} <= set(seen)
    page.keyboard.press("Enter")
    page.wait_for_url("**/group/**")
    page.locator("summary >> text=Score the members").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.type("1")
    page.keyboard.press("Enter")
    page.wait_for_url("**labeled=1")
