"""Which files there are and which events they hold. File names and files are the only state.

A name is `<stream>-<first>-<last>-<at>[-c<level>].parquet`: the lowest and highest stream sequence in it, the
stream time of its first row in hexadecimal microseconds, and how often it was compacted. An event is identified by
sequence and stream time together: a stream that was deleted and made again, or a log that lost its end in a power
cut, uses the same sequences again.
"""

from __future__ import annotations

import bisect
import functools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline import streams
from pipeline.events import AnyEvent, schema
from pipeline.telemetry.logs import get_logger
from store import columns
from store.target import DamagedFileError, Target

log = get_logger("store.catalog")

REPLACES = "journeyman.replaces"
"""Footer key: the files of the same folder whose rows this compacted file holds, as a JSON list."""

_NAME = re.compile(
    r"(?P<stream>[A-Z]+)-(?P<first>\d+)-(?P<last>\d+)-(?P<at>[0-9a-f]+)(?:-c(?P<level>\d+))?\.parquet"
)


@dataclass(frozen=True, order=True)
class FileName:
    """The parts of a file's name."""

    stream: str
    first: int
    last: int
    at: int
    """Stream time of the first row in microseconds."""
    level: int = 0
    """How often its rows were compacted."""

    @classmethod
    def parse(cls, name: str) -> FileName | None:
        """The parts of `name`; `None` where it is no name of the store's."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return cls(
            match["stream"],
            int(match["first"]),
            int(match["last"]),
            int(match["at"], 16),
            int(match["level"] or 0),
        )

    def __str__(self) -> str:
        level = f"-c{self.level}" if self.level else ""
        return f"{self.stream}-{self.first:012d}-{self.last:012d}-{self.at:x}{level}.parquet"


class Intervals:
    """A set of integers, kept as disjoint ranges. Made for stream sequences, which are nearly all adjacent."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __contains__(self, value: int) -> bool:
        i = bisect.bisect_right(self._starts, value) - 1
        return i >= 0 and value <= self._ends[i]

    def __len__(self) -> int:
        """The number of ranges."""
        return len(self._starts)

    def add(self, first: int, last: int) -> None:
        """Add the integers from `first` to `last`, both included."""
        i = bisect.bisect_left(self._ends, first - 1)
        j = bisect.bisect_right(self._starts, last + 1)
        if i < j:
            first, last = min(first, self._starts[i]), max(last, self._ends[j - 1])
        self._starts[i:j] = [first]
        self._ends[i:j] = [last]

    def update(self, values: npt.NDArray[np.int64]) -> None:
        """Add all values."""
        if not len(values):
            return
        ordered = np.unique(values)
        breaks = np.flatnonzero(np.diff(ordered) != 1)
        starts = ordered[np.concatenate(([0], breaks + 1))]
        ends = ordered[np.concatenate((breaks, [len(ordered) - 1]))]
        for first, last in zip(starts.tolist(), ends.tolist(), strict=True):
            self.add(first, last)


def live(target: Target, tag: str) -> list[str]:
    """The files that readers read: all but those whose rows are in a compacted file of the same folder. Raises
    `DamagedFileError`."""
    while True:
        try:
            return _live(target, tag)
        except FileNotFoundError:
            continue  # compaction removed a file after it was listed


def _live(target: Target, tag: str) -> list[str]:
    names = target.names(tag)
    replaced: set[str] = set()
    for name in names:
        parsed = FileName.parse(name)
        if parsed is not None and parsed.level:
            replaced.update(replaced_by(target, tag, name))
    return [n for n in names if n not in replaced]


def replaced_by(target: Target, tag: str, name: str) -> list[str]:
    """The files whose rows the compacted file `name` holds."""
    listed: list[str] = json.loads(target.metadata(tag, name).get(REPLACES, "[]"))
    return listed


class Catalog:
    """The sequences that files hold, by stream. The writers of one process share it."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._held: dict[str, Intervals] = {}
        self._rows = functools.lru_cache(maxsize=32)(self._read_rows)

    def load(self) -> list[tuple[str, FileName]]:
        """Read the sequences of all files. Damaged files are set aside and returned as (tag, name), to be repaired."""
        damaged: list[tuple[str, FileName]] = []
        files = rows = 0
        for tag in schema.tables():
            for name in self._live_or_aside(tag, damaged):
                parsed = FileName.parse(name)
                if parsed is None:
                    continue
                try:
                    seqs = self._read_rows(tag, name)[0]
                except DamagedFileError as error:
                    damaged.append((tag, self._set_aside(tag, parsed, error)))
                    continue
                files += 1
                rows += len(seqs)
                self.held(parsed.stream).update(seqs)
        log.info("files read", files=files, events=rows, folder=str(self.target))
        return damaged

    def _live_or_aside(self, tag: str, damaged: list[tuple[str, FileName]]) -> list[str]:
        while True:
            try:
                return live(self.target, tag)
            except DamagedFileError as error:
                # Without its footer, a compacted file replaces nothing: its inputs are live again if they still exist.
                name = error.path.rpartition("/")[2]
                parsed = FileName.parse(name)
                assert parsed is not None
                damaged.append((tag, self._set_aside(tag, parsed, error)))

    def _set_aside(self, tag: str, name: FileName, error: DamagedFileError) -> FileName:
        aside = self.target.set_aside(tag, str(name))
        log.error("damaged file set aside", file=aside, why=str(error), first=name.first, last=name.last)
        return name

    def held(self, stream: str) -> Intervals:
        """The sequences of a stream that files hold."""
        return self._held.setdefault(stream, Intervals())

    def write(
        self,
        tag: str,
        events: Sequence[AnyEvent],
        seqs: Sequence[int],
        ats: Sequence[int],
        traces: Sequence[str],
    ) -> None:
        """Write a file of a tag's events, which `add` then takes note of. Raises as `columns.table` and `Target.write`
        do."""
        table = columns.table(tag, events, seqs, ats, traces)
        first = min(range(len(seqs)), key=seqs.__getitem__)
        name = FileName(streams.stream_of_subject(tag), seqs[first], max(seqs), ats[first])
        self.target.write(tag, str(name), [table], {"journeyman.event": tag})

    def add(self, stream: str, seqs: Sequence[int]) -> None:
        """Take note that a file was written with these sequences."""
        self.held(stream).update(np.asarray(seqs, dtype=np.int64))

    def already(self, stream: str, events: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
        """The subset of `events`, given as (sequence, stream time in microseconds), that files hold."""
        held = self.held(stream)
        suspects = {e for e in events if e[0] in held}
        if not suspects:
            return set()
        wanted = np.unique(np.fromiter((s for s, _ in suspects), dtype=np.int64))
        while True:
            try:
                return suspects & self._find(stream, wanted)
            except FileNotFoundError:
                continue  # compaction removed a file: search the one that replaced it

    def _find(self, stream: str, wanted: npt.NDArray[np.int64]) -> set[tuple[int, int]]:
        """(sequence, stream time) of the rows that have one of these sequences."""
        found: set[tuple[int, int]] = set()
        for tag in schema.tables():
            if streams.stream_of_subject(tag) != stream:
                continue
            for name in live(self.target, tag):
                parsed = FileName.parse(name)
                if parsed is None or not ((wanted >= parsed.first) & (wanted <= parsed.last)).any():
                    continue
                seqs, ats = self._rows(tag, name)
                hits = np.flatnonzero(np.isin(seqs, wanted))
                found.update(zip(seqs[hits].tolist(), ats[hits].tolist(), strict=True))
        return found

    def _read_rows(self, tag: str, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        table: Any = self.target.read(tag, name, ["log_seq", "log_at"])
        return table["log_seq"].to_numpy(), table["log_at"].cast("int64").to_numpy()
