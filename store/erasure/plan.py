"""Which runs are a person's, and what they reach: groups, data sets, checkpoints.

A run is a person's if its `metadata` names the person as `subject`, or one of its calls does, in the field that its API
has for end users: `user` or `safety_identifier` (OpenAI), `metadata.user_id` (Anthropic), `metadata.subject`. So is a
run that was made of calls of such a run.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import Config
from pipeline.files import write_once
from pipeline.names import new_id
from store.datasets.folder import SPLITS

_OF_PERSON = """
SELECT trajectory FROM rollout_opened WHERE project = $project AND metadata ->> '$.subject' = $subject
UNION SELECT trajectory FROM rollout_completed WHERE project = $project AND metadata ->> '$.subject' = $subject
UNION SELECT trajectory FROM rollout_exchange WHERE project = $project AND $subject IN (
  request ->> '$.user', request ->> '$.safety_identifier', request ->> '$.metadata.user_id',
  request ->> '$.metadata.subject'
)
"""
_COPIES = """
SELECT DISTINCT trajectory FROM rollout_exchange WHERE project = $project AND copied_from <> ''
  AND regexp_replace(copied_from, '/[0-9]+$', '') IN (SELECT unnest($runs))
"""
_SOURCES = """
SELECT DISTINCT regexp_replace(copied_from, '/[0-9]+$', '') FROM rollout_exchange
WHERE project = $project AND trajectory IN (SELECT unnest($runs)) AND copied_from <> ''
"""
_OPEN = """
SELECT trajectory FROM trajectories WHERE project = $project AND outcome = 'open'
  AND trajectory IN (SELECT unnest($runs))
"""
_UNJUDGED = """
SELECT trajectory FROM rollout_completed WHERE project = $project AND outcome = 'scored'
  AND trajectory IN (SELECT unnest($runs)) AND trajectory NOT IN (
    SELECT unnest(list_transform(members, lambda m: m.trajectory)) FROM group_scored WHERE project = $project
    UNION ALL SELECT unnest(trajectories) FROM group_discarded WHERE project = $project
  )
"""
_GROUPS = """
SELECT DISTINCT model, "group" FROM group_scored WHERE project = $project
  AND len(list_filter(members, lambda m: list_contains($runs, m.trajectory))) > 0 ORDER BY ALL
"""
_UNTRAINED = """
SELECT DISTINCT model, "group", list_transform(members, lambda m: m.trajectory) FROM group_scored
WHERE project = $project AND branch = 'main' AND split = 'train'
  AND len(list_filter(members, lambda m: list_contains($runs, m.trajectory))) > 0
  AND (model, "group") NOT IN (
    SELECT (model, unnest(groups)) FROM policy_checkpoint WHERE project = $project AND branch = 'main'
    UNION ALL SELECT (model, "group") FROM group_discarded WHERE project = $project AND branch = 'main'
  )
"""
_LEARNED = """
SELECT DISTINCT branch, model, step, version FROM (
  SELECT branch, model, step, version, unnest(groups) AS "group" FROM policy_checkpoint WHERE project = $project
) WHERE (model, "group") IN (SELECT (g.model, g."group") FROM (SELECT unnest($groups) AS g)) ORDER BY ALL
"""
JOURNAL = "erasures"
"""Folder in the run directory with what unfinished erasures reach."""


class Group(msgspec.Struct, frozen=True):
    """A scored group with runs of the person."""

    model: str
    group: str


class Plan(msgspec.Struct, kw_only=True):
    """What an erasure reaches. It is written down before anything is deleted, so that an erasure that was interrupted
    is completed. It doesn't name the person."""

    erasure: str
    digest: str
    runs: list[str] = []
    left: list[str] = []
    """Runs of the person that are not finished, and stay for the next erasure."""
    groups: list[Group] = []
    untrained: list[tuple[str, str, list[str]]] = []
    """Model, group and runs of groups that wait for the trainer."""
    folders: list[str] = []
    """Data sets in the run directory with rows of these runs."""
    learned: list[str] = []
    clean: dict[str, str] = {}
    messages: dict[str, int] = {}
    objects: int = 0
    rows: dict[str, int] = {}
    held_up: list[str] = []
    """What has to be done before anything may be deleted, as sentences."""


def digest_of(config: Config, subject: str) -> str:
    """Return the person's name as receipts have it. The key is made when it is first needed."""
    key = Path(config.run_dir, "keys", "erasure.key")
    write_once(key, lambda: secrets.token_hex(32).encode())
    return hmac.new(key.read_bytes(), f"{config.project}\0{subject}".encode(), hashlib.sha256).hexdigest()


def journal_of(config: Config, digest: str) -> Path:
    """Return the file in which a person's unfinished erasure is written down."""
    return Path(config.run_dir, JOURNAL, f"{digest[:32]}.json")


def make_plan(
    connection: duckdb.DuckDBPyConnection,
    config: Config,
    subject: str,
    *,
    untrained: bool,
    finished: bool = False,
) -> Plan:
    """Return what the person's erasure reaches, with what an unfinished one had found. `untrained` says to discard the
    groups that wait for the trainer, which otherwise hold it up; `finished` to leave out whatever holds it up."""
    digest = digest_of(config, subject)
    journal = journal_of(config, digest)
    plan = (
        msgspec.json.decode(journal.read_bytes(), type=Plan)
        if journal.exists()
        else Plan(erasure=new_id("erasure"), digest=digest)
    )
    values: dict[str, Any] = {"project": config.project}
    runs = {*plan.runs, *_column(connection, _OF_PERSON, values | {"subject": subject})}
    while copies := {*_column(connection, _COPIES, values | {"runs": sorted(runs)})} - runs:
        runs |= copies
    left: set[str] = set()
    if finished:
        left = _unfinished(connection, config, runs, untrained=untrained).difference(plan.runs)
    plan.left, runs = sorted(left), runs - left
    plan.runs = sorted(runs)
    values["runs"] = plan.runs
    holding = [
        (_column(connection, _OPEN, values), "runs", "are open: complete them first"),
        (
            _column(connection, _UNJUDGED, values),
            "runs",
            "wait for a judge: erase them when they are scored",
        ),
    ]
    plan.untrained = [(m, g, t) for m, g, t in connection.execute(_UNTRAINED, values).fetchall()]
    if not untrained:
        why = (
            "wait for the trainer: erase them when they are trained, or stop the trainer and add --untrained, which "
            "discards them"
        )
        holding.append(([group for _, group, _ in plan.untrained], "groups", why))
    plan.held_up = [_reason(names, what, why) for names, what, why in holding if names]
    groups = {Group(m, g) for m, g in connection.execute(_GROUPS, values).fetchall()}
    plan.groups = sorted({*plan.groups, *groups}, key=lambda g: (g.model, g.group))
    if plan.groups:
        _add_versions(connection, config, plan)
    plan.folders = sorted({*plan.folders, *(str(f) for f in _data_sets(Path(config.run_dir), runs))})
    return plan


def _unfinished(
    connection: duckdb.DuckDBPyConnection, config: Config, runs: set[str], *, untrained: bool
) -> set[str]:
    """Return those of the runs that are open or wait for a judge, or for the trainer unless `untrained`, and the runs
    whose calls they are made of: these tell that they are the person's."""
    values: dict[str, Any] = {"project": config.project, "runs": sorted(runs)}
    found = {*_column(connection, _OPEN, values), *_column(connection, _UNJUDGED, values)}
    if not untrained:
        found.update(*(members for _, _, members in connection.execute(_UNTRAINED, values).fetchall()))
    while sources := {*_column(connection, _SOURCES, values | {"runs": sorted(found)})} - found:
        found |= sources
    return found & runs


def _add_versions(connection: duckdb.DuckDBPyConnection, config: Config, plan: Plan) -> None:
    """Set the versions that learned from the groups, and for each model the last one of `main` before them."""
    values = {"project": config.project, "groups": [msgspec.structs.asdict(group) for group in plan.groups]}
    rows = connection.execute(_LEARNED, values).fetchall()
    plan.learned = [version if branch == "main" else f"{branch}/{version}" for branch, _, _, version in rows]
    first: dict[str, int] = {}
    for branch, model, step, _ in rows:
        if branch == "main":
            first[model] = min(step, first.get(model, step))
    plan.clean = {model: f"{model}@{step - 1}" for model, step in first.items()}


def _data_sets(folder: Path, runs: set[str]) -> Iterator[Path]:
    """Yield the folders below a run directory that `journeywork dataset` wrote, with rows of these runs."""
    for card in folder.rglob("README.md"):
        for split in SPLITS:
            file = card.parent / f"{split}.parquet"
            if (
                file.is_file()
                and "journeywork dataset" in card.read_text(errors="replace")
                and _names(file) & runs
            ):
                yield card.parent
                break


def _names(file: Path) -> set[str]:
    rows: pa.Table = pq.read_table(file)
    names: set[str] = set()
    for name in ("run", "runs"):
        if name in rows.column_names:
            for value in rows[name].to_pylist():
                names.update([value] if isinstance(value, str) else value or ())
    return names


def _column(connection: duckdb.DuckDBPyConnection, query: str, values: dict[str, Any]) -> list[str]:
    return [str(row[0]) for row in connection.execute(query, values).fetchall()]


def _reason(names: list[str], what: str, why: str) -> str:
    shown = ", ".join(sorted(names)[:10]) + (", …" if len(names) > 10 else "")
    return f"{len(names)} {what} ({shown}) {why}"
