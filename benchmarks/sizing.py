"""Computes what an installation of a given size needs, from measured inputs; nothing is run.

    python -m benchmarks.sizing            # the tables of docs/sizing.md

Every input is a field of `Measured` with the command that measured it, and every assumption about the load a field of
`Load`. The estimate is meant to be right within a factor of two.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_hour import SHAPES

RESULTS = Path(__file__).with_name("results")
DAY_S = 86_400.0
GB = 1e9


def _result(file: str, *keys: str) -> float:
    found = json.loads((RESULTS / file).read_text("utf-8"))
    for key in keys:
        found = found[key]
    return float(found)


@dataclass(frozen=True)
class Measured:
    """What one unit of work costs, on a core of the machine that the results name."""

    calls_per_core_s: float = _result("gateway.json", "capture_rps_per_core")
    """`python -m benchmarks.gateway`: captured calls a second and core of the gateway."""
    written_per_process_s: float = _result("store.json", "write_events_per_s")
    """`make bench-store`: events a second that one store writes."""
    judge_core_s: float = _result("judge.json", "cpu_ms_per_group") / 1000
    """`make bench-judge`: processor time of the judge for a group of eight, without that of the judge model."""
    turn_bytes: float = _result("exchanges.json", "follows_bytes_per_run") / _result(
        "exchanges.json", "turns"
    )
    """`python -m benchmarks.exchanges`: bytes that a call adds to the log, with its token ids and logprobs, in a run of
    20 turns."""
    whole_turn_bytes: float = _result("exchanges.json", "whole_bytes_per_run") / _result(
        "exchanges.json", "turns"
    )
    """The same if each exchange were recorded whole."""
    subject_bytes: float = (
        _result("bounded_log.json", "live_heap_mb", "median") * 1e6 / _result("bounded_log.json", "subjects")
    )
    """`python -m benchmarks.bounded_log`: live heap of a NATS server for a subject with its message."""
    resident: float = _result("bounded_log.json", "rss_mb", "process") / _result(
        "bounded_log.json", "live_heap_mb", "median"
    )
    """Resident memory of that server over its live heap: garbage and caches."""
    log_events_s: float = 8751.0
    """Events of 4 KB a second with three copies, three servers on two cores. Measured once by hand with NATS 2.15."""


@dataclass(frozen=True)
class Load:
    """What the agents do."""

    name: str
    trajectories_day: float
    turns: int = 20
    group_size: int = 8
    log_age_s: float = 2 * DAY_S
    peak: float = 3.0
    """The busiest minute over the mean of the day."""
    flush_s: float = 5.0
    """`store.flush_s`: the store writes files of new events this often."""

    @classmethod
    def of_agents(cls, agents: int, seconds_a_turn: float = 10.0) -> Load:
        """Agents that are always at work."""
        return cls(f"{agents:,} agents", agents * DAY_S / (20 * seconds_a_turn))


LOADS = (
    Load.of_agents(1000),
    Load.of_agents(10_000),
    Load("1 M trajectories a day", 1e6),
)


@dataclass(frozen=True)
class Size:
    """What `size` computes. Rates are those of the busiest minute."""

    calls_s: float
    events_s: float
    log_bytes: float
    """Bytes of one copy of the log."""
    whole_log_bytes: float
    """The same if each exchange were recorded whole, with its prompt."""
    subjects: float
    server_memory: float
    """Resident bytes of a NATS server for the subjects and their messages."""
    gateway_cores: float
    judge_cores: float
    stores: int
    log_share: float
    """Share of the measured event rate of a log with three copies."""
    objects_day: float
    """Files that the store writes a day, before compaction."""


def size(load: Load, measured: Measured | None = None) -> Size:
    m = measured or Measured()
    runs_s = load.trajectories_day / DAY_S
    calls_s = runs_s * load.turns * load.peak
    # Opened and completed, and a share of a group's events.
    events_s = runs_s * (load.turns + 2 + 2 / load.group_size) * load.peak
    run_bytes = load.turns * m.turn_bytes
    subjects = runs_s * 3 * load.log_age_s
    return Size(
        calls_s=calls_s, events_s=events_s, log_bytes=runs_s * run_bytes * load.log_age_s,
        whole_log_bytes=runs_s * load.turns * m.whole_turn_bytes * load.log_age_s, subjects=subjects,
        server_memory=subjects * m.subject_bytes * m.resident,
        gateway_cores=calls_s / m.calls_per_core_s,
        judge_cores=runs_s / load.group_size * load.peak * m.judge_core_s,
        stores=math.ceil(events_s / m.written_per_process_s), log_share=events_s / m.log_events_s,
        objects_day=DAY_S / load.flush_s * 3,
    )  # fmt: skip


def _row(name: str, *cells: str) -> str:
    return "| " + " | ".join((name, *cells)) + " |"


def tables() -> str:
    """Return the page's tables in Markdown."""
    sizes = [size(load) for load in LOADS]
    lines = [_row("", *(load.name for load in LOADS)), _row("---", *("---" for _ in LOADS))]
    lines += [
        _row("trajectories a day", *(f"{load.trajectories_day:,.0f}" for load in LOADS)),
        _row("calls a second, busiest minute", *(f"{s.calls_s:,.0f}" for s in sizes)),
        _row("events a second, busiest minute", *(f"{s.events_s:,.0f}" for s in sizes)),
        _row("log, if it held whole exchanges", *(f"{s.whole_log_bytes / GB:,.0f} GB" for s in sizes)),
        _row("log, one copy", *(f"{s.log_bytes / GB:,.0f} GB" for s in sizes)),
        _row("subjects on the log", *(f"{s.subjects / 1e6:,.1f} M" for s in sizes)),
        _row(
            "resident memory of a NATS server for them", *(f"{s.server_memory / GB:,.1f} GB" for s in sizes)
        ),
        _row("share of the measured rate of the log", *(f"{s.log_share:.0%}" for s in sizes)),
        _row("gateway, cores", *(f"{s.gateway_cores:,.2f}" for s in sizes)),
        _row("judge, cores", *(f"{s.judge_cores:,.2f}" for s in sizes)),
        _row("stores", *(f"{s.stores}" for s in sizes)),
        _row("files a day, before compaction", *(f"{s.objects_day:,.0f}" for s in sizes)),
        "",
        _row("base model", "adapter of rank 16", "of rank 64"),
        _row("---", "---", "---"),
    ]
    lines += [
        _row(shape.name, *(f"{2 * shape.adapter(rank) / 1e6:,.0f} MB" for rank in (16, 64)))
        for shape in SHAPES
    ]
    return "\n".join(lines) + "\n"


def inputs() -> str:
    """Return the table of measured inputs in Markdown."""
    m = Measured()
    rows = (
        ("captured calls a second and core of the gateway", f"{m.calls_per_core_s:,.0f}",
         "`python -m benchmarks.gateway`"),
        ("bytes that a call adds to the log, in a run of 20 turns", f"{m.turn_bytes:,.0f}",
         "`python -m benchmarks.exchanges`"),
        ("the same if each exchange were recorded whole", f"{m.whole_turn_bytes:,.0f}", "the same"),
        ("live heap of a NATS server for a subject with its message", f"{m.subject_bytes:,.0f} B",
         "`python -m benchmarks.bounded_log`"),
        ("resident memory of that server over its live heap", f"{m.resident:.1f}", "the same"),
        ("events a second that one store writes, before Delta Lake", f"{m.written_per_process_s:,.0f}",
         "`make bench-store`"),
        ("processor time of the judge for a group of eight, without the judge model's",
         f"{1000 * m.judge_core_s:.0f} ms", "`make bench-judge`"),
        ("events of 4 KB a second with three copies, three servers on two cores", f"{m.log_events_s:,.0f}",
         "measured once by hand with NATS 2.15"),
    )  # fmt: skip
    return "\n".join(
        [_row("input", "value", "command"), _row("---", "---", "---"), *(_row(*row) for row in rows), ""]
    )


if __name__ == "__main__":
    sys.stdout.write(f"{tables()}\n{inputs()}")
