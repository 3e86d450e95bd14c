"""The pictures of README and docs/, from a recorded run.

    python -m docs.make_pictures curve --run-dir runs/demo     # docs/pictures/curve.json, read from a run of the demo
    python -m docs.make_pictures curve                         # docs/pictures/curve.svg, drawn from curve.json
    python -m docs.make_pictures dashboard --run-dir runs/demo # docs/pictures/dashboard-*.png, in Chromium

The curve is 420 px wide, so that a phone shows it unscaled. `--check` exits 1 where it differs from its data."""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import uvicorn

from examples.common import curve
from examples.common.running import rows
from journeywork.statistics import wilson

FOLDER = Path(__file__).parent / "pictures"
GAMES_A_POINT = 512

GAMES = """
SELECT reward FROM trajectories
WHERE split = 'train' AND outcome = 'scored' AND reward IS NOT NULL ORDER BY completed_at
"""


def read_curve(run_dir: Path) -> dict[str, Any]:
    """Return what the curve shows: win rates of consecutive training games, and of the held-out games before and after.

    Raises `FileNotFoundError` where the run has no report, `CalledProcessError` where the store can't be asked."""
    report = json.loads((run_dir / "report.json").read_text())
    games = rows(run_dir, GAMES)
    points = []
    for first in range(0, len(games) - GAMES_A_POINT + 1, GAMES_A_POINT):
        block = games[first : first + GAMES_A_POINT]
        rate = wilson(sum(g["reward"] == 1 for g in block), len(block))
        points.append({"runs": first + len(block)} | curve.as_json(rate))
    held_out = {
        when: {
            "mean": report[f"win_rate_{when}"]["value"],
            "ci95": report[f"win_rate_{when}"]["ci95"],
            "count": report[f"win_rate_{when}"]["games"],
        }
        for when in ("before", "after")
    }
    run = {"seed": report["seed"], "training": points, **held_out}
    return {"unit": "games", "measure": "win rate", "runs": [run]}


def shoot_dashboard(run_dir: Path) -> list[Path]:
    """Take pictures of the dashboard's pages over a run, as a desktop and a phone show them. Needs Chromium."""
    # Imported here: the curve needs neither a browser nor a database.
    from pipeline.config import with_values
    from pipeline.running.runs import run_settings
    from store.showing.dashboard.server import SECTIONS, make_app
    from tests.store.showing.dashboard.browser import chromium, missing

    if why := missing():
        raise SystemExit(f"docs.make_pictures: {why}")
    config = with_values(run_settings(run_dir, sections=SECTIONS), {"run_dir": str(run_dir)})
    made = []
    with serving(make_app(config)) as url:
        with httpx.Client(base_url=url, timeout=60) as client:
            (group, *_) = client.get("/groups.json?sort=-spread").json()["rows"]
            name = quote(group["group_id"], safe="")
            (member, *_) = client.get(f"/group/{name}.json").json()["members"]
            (checkpoint, *_) = client.get("/checkpoints.json?sort=-step").json()["rows"]
        pages = {
            "overview": "overview", "group": f"group/{name}", "trajectory": f"trajectory/{quote(member['trajectory'])}",
            "checkpoint": f"checkpoint/{checkpoint['version']}",
        }  # fmt: skip
        with chromium() as browser:
            for title, path in pages.items():
                for suffix, width, scheme in (("", 1440, "light"), ("-phone", 360, "dark")):
                    size = {"width": width, "height": 900}
                    with browser.new_context(viewport=size, color_scheme=scheme) as context:  # type: ignore[arg-type]
                        page = context.new_page()
                        page.goto(f"{url}/{path}", wait_until="networkidle")
                        made.append(FOLDER / f"dashboard-{title}{suffix}.png")
                        page.screenshot(path=made[-1])
    return made


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """Answer for an application in a thread; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def main() -> int:
    """Write the picture that the command line names and print its path. With `--check`, write nothing and return 1 if
    the picture differs from its source. Exits 2 for options that contradict each other."""
    parser = argparse.ArgumentParser(prog="python -m docs.make_pictures")
    parser.add_argument("picture", choices=("curve", "dashboard"))
    parser.add_argument("--run-dir", type=Path, help="a run of the demo, to read the curve from, or to show")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where the picture differs"
    )
    given = parser.parse_args()
    if given.check and (given.run_dir or given.picture == "dashboard"):
        parser.error("--check compares the curve with its recorded data: it takes no --run-dir, no dashboard")
    FOLDER.mkdir(exist_ok=True)
    if given.picture == "dashboard":
        for file in shoot_dashboard(given.run_dir or Path("runs/demo")):
            sys.stdout.write(f"{file}\n")
        return 0
    data, out = FOLDER / "curve.json", FOLDER / "curve.svg"
    if given.run_dir:
        data.write_text(json.dumps(read_curve(given.run_dir), indent=1) + "\n")
    drawn = curve.draw(json.loads(data.read_text()))
    if given.check:
        return int(not out.exists() or out.read_text() != drawn)
    out.write_text(drawn)
    sys.stdout.write(f"{out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
