"""Learning curves: from a run to its report, and from reports to a picture with 95 % intervals.

    python -m examples.common.curve examples/NAME runs/NAME-0 runs/NAME-1    # NAME's curve.json and curve.svg
    python -m examples.common.curve examples/NAME                            # curve.svg, drawn from curve.json

Both pictures and their data are in the example's folder. A point of a training curve is the mean reward of
consecutive groups, with an interval over the groups' means, because the attempts of a group share their task.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from journeywork import Estimate
from journeywork.statistics import mean_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 14
"""Points of a training curve, at most."""
GROUPS_A_POINT = 30
"""Groups in a point, at least: means of fewer groups have intervals too wide to show a trend."""
BLUE, ORANGE = "#2b6cb0", "#c05621"
SHADES = (BLUE, "#2f855a", "#6b46c1", "#718096")
"""Colours of the training curves, a run each."""

GROUPS = """
SELECT avg({value}) AS reward, count(*) AS runs
FROM rewards r JOIN trajectories t USING (project, trajectory)
WHERE r.split = 'train' AND r.branch = 'main' AND r.outcome = 'scored'
GROUP BY r.group_id ORDER BY max(t.completed_at)
"""


def as_json(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate for a JSON file. A bound that is infinite or unknown is `None`."""
    low, high = (value if math.isfinite(value) else None for value in (estimate.low, estimate.high))
    return {"mean": estimate.mean, "ci95": [low, high], "count": estimate.count}


def training_points(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the points of a training curve. `groups`: mean reward and number of runs of each group, in the order of
    their ends. Groups that do not fill a point are part of the last one."""
    size = max(GROUPS_A_POINT, -(-len(groups) // POINTS))
    count = max(len(groups) // size, 1)
    points, runs = [], 0
    for n in range(count):
        part = groups[n * size : (n + 1) * size if n + 1 < count else None]
        runs += sum(group["runs"] for group in part)
        points.append({"runs": runs} | as_json(mean_of([group["reward"] for group in part])))
    return points


def as_svg(figure: Figure) -> str:
    """Return the figure as SVG text that is the same in every run."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "journeywork", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, transparent=False)
    plt.close(figure)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def draw(recorded: dict[str, Any]) -> str:
    """Return the picture of recorded runs as SVG, 420 px wide so that a phone shows it unscaled.

    `recorded` has `unit` (what is counted, in the plural), `measure` (the vertical axis) and `runs` (reports)."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    unit = recorded["unit"]
    with mpl.rc_context({"font.family": "sans-serif", "font.size": 9}):
        figure, axes = plt.subplots(figsize=(4.2, 2.9), dpi=100, layout="constrained")
        last = max(run["training"][-1]["runs"] for run in recorded["runs"])
        for number, (run, colour) in enumerate(zip(recorded["runs"], SHADES, strict=False)):
            at = [point["runs"] for point in run["training"]]
            low, high = zip(*(point["ci95"] for point in run["training"]), strict=True)
            axes.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)
            label = f"training {unit}, seed {run['seed']}"
            axes.plot(at, [point["mean"] for point in run["training"]], color=colour, label=label)
            for when, x in (("before", 0.0), ("after", float(last))):
                rate, shift = run[when], 0.015 * last * number
                mean, (low_end, high_end) = rate["mean"], rate["ci95"]
                axes.errorbar(
                    [x + shift],
                    [mean],
                    yerr=[[mean - low_end], [high_end - mean]],
                    fmt="o",
                    color=ORANGE,
                    markersize=4,
                    capsize=4,
                    label=f"the same {rate['count']:,} held-out {unit}" if when == "before" and not number else None,
                )
                if not number:
                    side = 1 if when == "before" else -1
                    axes.annotate(
                        f"{mean:.3f}",
                        (x, mean),
                        xytext=(8 * side, 8),
                        textcoords="offset points",
                        ha="left" if side == 1 else "right",
                        color=ORANGE,
                        weight="bold",
                    )
        axes.set(xlabel=f"training {unit}", ylabel=f"{recorded['measure']}, 95 % intervals")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right", fontsize=8)
        return as_svg(figure)


def record(folder: Path, run_dirs: list[Path]) -> None:
    """Write the reports of these runs to the example's `curve.json`. Its `unit` and `measure` stay."""
    file = folder / "curve.json"
    recorded = json.loads(file.read_text()) if file.exists() else {"unit": "runs", "measure": "mean reward"}
    recorded["runs"] = [json.loads((run_dir / "report.json").read_text()) for run_dir in run_dirs]
    file.write_text(json.dumps(recorded, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.common.curve")
    parser.add_argument("folder", type=Path, help="the example's folder")
    parser.add_argument("run_dirs", type=Path, nargs="*", help="its recorded runs, one for each seed")
    args = parser.parse_args()
    if args.run_dirs:
        record(args.folder, args.run_dirs)
    out = args.folder / "curve.svg"
    out.write_text(draw(json.loads((args.folder / "curve.json").read_text())))
    sys.stdout.write(f"{out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
