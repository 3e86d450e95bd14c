"""Renders a snapshot: as lines for a terminal of any size, or as one plain line for any other output."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.text import Text

from pipeline.printing import visible, with_code
from store.showing.watch.snapshot import Model, Snapshot

_BLOCKS = " ▁▂▃▄▅▆▇█"
_STATES = {"ready": "green", "stopped": "dim"}
_MAX_CHART_ROWS = 16
_WIDE = 120
"""Width from which an alarm's line also shows the action to take."""
_METRICS = (
    ("staleness", "staleness_mean"), ("entropy", "entropy"), ("KL", "kl"), ("no variance", "no_variance_share"),
    ("grad norm", "grad_norm"), ("tokens/s", "trained_tokens_per_s"), ("step s", "step_s"),
)  # fmt: skip


def lines(snapshot: Snapshot, width: int, height: int) -> list[Text]:
    """Return the view: at most `height` lines of at most `width` cells. Charts get the lines that the rest leaves."""
    fixed = [_head(snapshot, width), _services(snapshot), Text(), *_figures(snapshot)]
    foot = [*_replicas(snapshot), *_alarms(snapshot, width)]
    models = snapshot.models or (Model("no model"),)
    left = height - len(fixed) - len(foot) - 1
    rows = min(_MAX_CHART_ROWS, left // len(models) - 2)
    charts: list[Text] = []
    for model in models:
        charts.append(_model(model, width))
        if rows >= 1:
            charts += [Text(line, "cyan") for line in chart(model.rewards, width - 9, rows)]
        charts.append(Text())
    shown = [*fixed, *charts[: max(0, left)], *foot]
    shown += [Text()] * (height - 1 - len(shown))
    shown = [*shown[: height - 1], _foot(snapshot)]
    for line in shown:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return shown


def plain(snapshot: Snapshot) -> str:
    """Return the view as one line."""
    parts = [
        snapshot.at.strftime("%H:%M:%S"),
        *([] if snapshot.running else [f"{snapshot.run_dir} is NOT RUNNING"]),
        f"runs/s {snapshot.runs_per_s:.2f}",
        f"open groups {snapshot.open_groups}",
        f"behind {_lag(snapshot)}",
    ]
    for model in snapshot.models:
        reward = f" reward {model.rewards[-1]:.3f}" if model.rewards else ""
        age = f" staleness {model.metrics['staleness_mean']:.2f}" if "staleness_mean" in model.metrics else ""
        parts.append(f"{model.version}{reward}{age}")
    parts += [f"{replica} holds {versions}" for replica, versions in snapshot.replicas]
    parts += [f"judge ${snapshot.judge_usd:.4g}", f"dead letters {snapshot.dead_letters}"]
    names = [f"ALARM {text}" for text in _alarm_texts(snapshot)]
    return " | ".join(parts + (names or ["no alarms"]))


def chart(values: Sequence[float], width: int, rows: int) -> list[str]:
    """Draw `values` as a chart of `rows` lines in block characters, `width` columns wide. The first line begins with
    the maximum, the last with the minimum. If there are more values than columns, neighbouring values are averaged."""
    if not values:
        return ["  no step yet"] + [""] * (rows - 1)
    columns = _downsample(values, width)
    low, high = min(columns), max(columns)
    span = (high - low) or 1.0
    # A line is 8 levels high: the block characters fill it in eighths.
    levels = [1 + round((value - low) / span * (rows * 8 - 1)) for value in columns]
    out = []
    for row in range(rows - 1, -1, -1):  # from the top line
        label = high if row == rows - 1 else low if row == 0 else None
        scale = f"{label:8.3f} " if label is not None else " " * 9
        out.append(scale + "".join(_BLOCKS[max(0, min(8, level - row * 8))] for level in levels))
    return out


def _downsample(values: Sequence[float], width: int) -> list[float]:
    """Average neighbouring values so that at most `width` are left."""
    if len(values) <= width:
        return list(values)
    edges = [i * len(values) // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _head(snapshot: Snapshot, width: int) -> Text:
    clock, room = snapshot.at.strftime("%H:%M:%S UTC"), max(8, width - 40)
    name = snapshot.run_dir if len(snapshot.run_dir) <= room else f"…{snapshot.run_dir[1 - room :]}"
    line = Text(f"journeywork {name}", "bold")
    if not snapshot.running:
        line.append("  not running", "bold red")
    line.append(" " * max(2, width - line.cell_len - len(clock)) + clock, "not bold dim")
    return line


def _services(snapshot: Snapshot) -> Text:
    line = Text()
    for name, state in snapshot.services.items():
        line.append(f"{name} ", "dim").append(f"{state}  ", _STATES.get(state, "bold red"))
    return (
        line
        if snapshot.services
        else Text("journeywork up has started no process in this run directory", "dim")
    )


def _figures(snapshot: Snapshot) -> list[Text]:
    dead = "bold red" if snapshot.dead_letters else ""
    return [
        _pairs(
            ("rollouts/s", f"{snapshot.runs_per_s:.2f}", ""),
            ("calls/s", f"{snapshot.calls_per_s:.2f}", ""),
            ("open runs", f"{snapshot.open_runs:,}", ""),
            ("open groups", f"{snapshot.open_groups:,}", ""),
        ),
        _pairs(
            ("judge cost", f"${snapshot.judge_usd:.4g}", ""),
            ("dead letters", f"{snapshot.dead_letters:,}", dead),
            ("stream lag", _lag(snapshot), "" if snapshot.lag is not None else "bold red"),
        ),
        Text(),
    ]


def _pairs(*pairs: tuple[str, str, str]) -> Text:
    line = Text()
    for name, value, style in pairs:
        line.append(f"{name} ", "dim").append(f"{value}   ", style or "bold")
    return line


def _lag(snapshot: Snapshot) -> str:
    if snapshot.lag is None:
        return "the log does not answer"
    # Consumers of services that were not started (telemetry without a destination) are left out.
    return " ".join(f"{name} {count:,}" for name, count in snapshot.lag.items() if name in snapshot.services)


def _model(model: Model, width: int) -> Text:
    line = Text(f"{model.version} ", "bold")
    if model.rewards:
        line.append("reward ", "dim").append(f"{model.rewards[-1]:.3f}  ", "bold")
    for name, key in _METRICS:
        if key in model.metrics:
            text = f"{name} {model.metrics[key]:.3g}  "
            if line.cell_len + len(text) > width:
                break
            line.append(f"{name} ", "dim").append(f"{model.metrics[key]:.3g}  ")
    return line


def _replicas(snapshot: Snapshot) -> list[Text]:
    shown = [Text(f"{replica} ", "dim").append(versions) for replica, versions in snapshot.replicas[:4]]
    if len(snapshot.replicas) > 4:
        shown.append(Text(f"and {len(snapshot.replicas) - 4} more replicas", "dim"))
    return shown


def _alarms(snapshot: Snapshot, width: int) -> list[Text]:
    texts = _alarm_texts(snapshot)
    if not texts:
        return [Text("no alarms", "green")]
    shown = [Text(f"! {text}", "bold red") for text in texts[:5]]
    if width >= _WIDE:
        for line, alarm in zip(
            shown, [None] * len(snapshot.supervisor_alarms) + list(snapshot.alarms), strict=False
        ):
            if alarm is not None:
                line.append("  ").append(with_code(alarm["action"], "not bold dim"))
    if len(texts) > 5:
        shown.append(Text(f"and {len(texts) - 5} more alarms", "red"))
    return shown


def _alarm_texts(snapshot: Snapshot) -> list[str]:
    own = []
    for alarm in snapshot.alarms:
        of = f" of {alarm['model']}" if alarm["model"] else ""
        own.append(f"{alarm['title']}{of}: {alarm['detail']}")
    return [visible(text) for text in (*snapshot.supervisor_alarms, *own)]


def _foot(snapshot: Snapshot) -> Text:
    line = Text()
    if ui := snapshot.urls.get("ui"):
        line.append("dashboard ", "dim").append(ui, "underline").append("   ")
    if "gateway" in snapshot.services:
        gateway = snapshot.urls["gateway"]
        line.append("gateway ", "dim").append(f"{gateway}/v1   ")
    return line.append("Ctrl-C ends", "dim")
