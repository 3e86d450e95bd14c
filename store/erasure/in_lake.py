"""Replaces the files of the lake that hold rows of erased runs. `store.erasure.command` counts these rows for its
summary, and then erases them.

Rows of the runs' own events are left out. A scored group keeps its row, because the other runs' rewards and the steps'
figures rest on it, without texts: the explanations and hints in its verdicts, which may speak of any of its runs, the
hints of the erased runs, and its task if all of its runs are erased. A file that is replaced is deleted at once, not
after `store.compact_grace_s`, and so is every file in a table's folder that holds such rows and is not part of the
table, as after a merge.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake.exceptions import CommitFailedError
from pyarrow import fs

from pipeline import crash
from pipeline.events import DeadLettered, GroupScored, wire_name
from store.erasure.on_log import SubjectsOfPlan
from store.erasure.plan import Plan
from store.lake import columns
from store.lake.commits import remove_action, write_rows
from store.lake.lake import Lake
from store.lake.table import EventTable

_COMMITTED_S = 15.0
"""Age in seconds from which on a file that is not part of its table never will be."""
_RETRY_S = 1.0
_SCORED, _DEAD = wire_name(GroupScored), wire_name(DeadLettered)


class Rewriter:
    """Finds and replaces rows of a plan in one lake."""

    def __init__(self, lake: Lake, project: str, plan: Plan) -> None:
        self._lake, self._project = lake, project
        self._runs = set(plan.runs)
        self._groups = {(g.model, g.group) for g in plan.groups}
        self._is_of_plan = SubjectsOfPlan(project, plan)

    def count(self) -> dict[str, int]:
        """Return by table the number of rows that `erase` would change."""
        counts: dict[str, int] = {}
        for table in self._lake.tables():
            if rows := table.read_newest_files(partial(self._count_affected, table)):
                counts[table.tag] = rows
        return counts

    def _count_affected(self, table: EventTable) -> int:
        """Return the number of rows of the plan in the files of the table's newest version."""
        return sum(len(self._affected_rows(table, name)) for name in table.files().names)

    def erase(self) -> None:
        """Replace the files that hold rows of the plan, durably, and delete the old ones. May be called again."""
        for table in self._lake.tables():
            # A table object of its own: its commits are checked against the snapshot that this one read.
            own, replaced = EventTable(self._lake.storage, table.tag), set[str]()
            replace = partial(own.read_newest_files, partial(self._replace, own, replaced))
            replace()
            while self._delete_orphans(own, replaced):
                time.sleep(_RETRY_S)
                replace()

    def _delete_orphans(self, table: EventTable, replaced: set[str]) -> bool:
        """Delete the files in a table's folder that are not part of the table and hold rows of the plan. Return whether
        it has to be called again: one that is younger than `_COMMITTED_S`, and not in `replaced`, may be about to be
        committed by the store, so it stays for now."""
        folder = fs.FileSelector(f"{table.storage.root}/{table.tag}", allow_not_found=True)
        # Before the snapshot: what another process commits between the two is then part of the table.
        infos = table.storage.files.get_file_info(folder)
        names, any_young = table.files().names, False
        for info in infos:
            name = info.base_name
            if not name.endswith(".parquet") or name in names:
                continue
            try:
                affected = self._affected_rows(table, name)
                if affected and name not in replaced and time.time() - info.mtime.timestamp() < _COMMITTED_S:
                    any_young = True
                elif affected:
                    table.storage.files.delete_file(table.storage.key(table.tag, name))
            except FileNotFoundError:
                continue  # the store's own vacuum was faster
        return any_young

    def _replace(self, table: EventTable, replaced: set[str]) -> None:
        """Replace the files of a table's newest version that hold rows of the plan; add their names to `replaced`."""
        for name in table.files().names:
            if not (affected := self._affected_rows(table, name)):
                continue
            rows = self._remaining_rows(table.tag, table.storage.read(table.tag, name), affected)
            added = [write_rows(table.storage, table.tag, rows)] if rows.num_rows else []
            try:
                table.commit([*added, remove_action(name)])
            except CommitFailedError:  # another process has merged the file: begin with the newest version
                self._replace(table, replaced)
                return
            replaced.add(name)
            crash.point("erase.file_replaced")

    def _affected_rows(self, table: EventTable, name: str) -> list[int]:
        """Return the indices of a file's rows that are to be left out or changed."""
        tag = table.tag
        if tag == _DEAD:
            subjects = table.storage.read(tag, name, ["original_subject"])["original_subject"].to_pylist()
            return [i for i, subject in enumerate(subjects) if self._is_of_plan(subject)]
        if tag == _SCORED:
            rows = table.storage.read(tag, name).to_pylist() if self._groups else []
            return [i for i, row in enumerate(rows) if self._redacted(row) != row]
        if "trajectory" not in columns.arrow_schema(tag).names:
            return []
        rows = table.storage.read(tag, name, ["project", "trajectory"]).to_pylist()
        return [i for i, row in enumerate(rows) if row["project"] == self._project and row["trajectory"] in self._runs]

    def _remaining_rows(self, tag: str, rows: pa.Table, affected: list[int]) -> pa.Table:
        """Return what stays of a file's rows: those that are not `affected` (indices); of scored groups all,
        redacted."""
        if tag == _SCORED:
            return pa.Table.from_pylist([self._redacted(row) for row in rows.to_pylist()], rows.schema)
        return rows.take(np.delete(np.arange(rows.num_rows), affected))

    def _redacted(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row of a scored group; if it is of the plan, without the judges' words, without the erased runs'
        hints, and without its task if all its runs are erased."""
        if row["project"] != self._project or (row["model"], row["group"]) not in self._groups:
            return row
        erased = [member["trajectory"] in self._runs for member in row["members"]]
        return row | {
            "task": "" if all(erased) else row["task"],
            "members": [
                member | {"hints": []} if gone else member for member, gone in zip(row["members"], erased, strict=True)
            ],
            "verdicts": [
                verdict | {"scores": [score | {"explanation": "", "hint": ""} for score in verdict["scores"]]}
                for verdict in row["verdicts"]
            ],
        }
