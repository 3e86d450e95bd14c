"""What a documented view is, and the columns that have one meaning in many views."""

from __future__ import annotations

from dataclasses import dataclass

import duckdb
import msgspec

from pipeline.events import schema

NEVER = "TIMESTAMP '1970-01-01'"
"""A time that was not recorded."""

GPU_USD_S = "gpu_usd_h() / 3600"
"""Price of a second of an inference server in USD, which `store.reading.sql` takes from the settings."""

_COMMON = {
    "project": "Namespace.",
    "model": "Serving name of the policy.",
    "trajectory": "Id of the run.",
    "group_id": "Id of the group: attempts at one task.",
    "branch": "Branch of the log: `main`, or one that a replay or rejudging wrote.",
    "task": "Task of the group.",
    "split": "`train` or `val`; `val` is never trained.",
    "outcome": "`scored`, `no_result` or `masked`.",
    "reward": "Final reward, after composition.",
    "given_by": "Name of the API key that gave it; empty where there are no keys.",
    "first_step": "Lowest policy step that sampled in the run.",
    "last_step": "Highest policy step that sampled in the run.",
    "seq": "Number of the call in its run, from 0.",
    "choice": "Index of the choice, where the client asked for several.",
    "policy_version": "Policy version that sampled, `<model>@<step>`.",
    "judge": "Verdict set that scored it: a name, or the hash of the judge configuration.",
    "version": "Policy version, `<model>@<step>`.",
    "step": "Step of the version.",
    "parent": "Version that it was trained from.",
    "batch_id": "Hash of parent, groups and training settings.",
    "trace_id": "Trace of the run, where it was traced.",
    "metrics": "Metrics of the step.",
    "detail": "The reason in words.",
}


@dataclass(frozen=True)
class View:
    """A documented view."""

    name: str
    purpose: str
    meanings: dict[str, str]
    """Of the columns that are no fields of `sources`, or mean something else here, and are not common."""
    sql: str
    sources: tuple[type[msgspec.Struct], ...] = ()
    """Events and their parts whose fields are columns under their own names: a field's docstring is the meaning."""

    def columns(self, connection: duckdb.DuckDBPyConnection) -> dict[str, str]:
        """Return the meaning of each column, in order; empty where its name says it all."""
        fields = {f.name: schema.meaning(f) for source in self.sources for f in schema.documented(source)}
        known = _COMMON | {name: meaning for name, meaning in fields.items() if meaning} | self.meanings
        return {name: known.get(name, "") for name in connection.view(self.name).columns}
