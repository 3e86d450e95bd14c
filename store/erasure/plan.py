"""Which runs are a person's, and what they reach: groups, data sets, checkpoints.

A run is a person's if its `metadata` names the person as `subject`, or one of its calls does, in the field that its API
has for end users: `user` or `safety_identifier` (OpenAI), `metadata.user_id` (Anthropic), `metadata.subject`. So is a
run that was made of calls of such a run, or that an answer of such a run corrected (`corrected_by`).
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import Config, ConfigError
from pipeline.files import read_json, write_once
from pipeline.names import new_id
from pipeline.versions.lake_files import S3
from store.datasets.folder import SPLITS

_OF_PERSON = """
SELECT trajectory FROM rollout_opened WHERE project = $project AND metadata ->> '$.subject' = $subject
UNION SELECT trajectory FROM rollout_completed WHERE project = $project AND metadata ->> '$.subject' = $subject
UNION SELECT trajectory FROM rollout_exchange WHERE project = $project AND $subject IN (
  request ->> '$.user', request ->> '$.safety_identifier', request ->> '$.metadata.user_id',
  request ->> '$.metadata.subject'
)
"""
_COPIED = """
SELECT trajectory, regexp_replace(copied_from, '/[0-9]+$', '') FROM rollout_exchange
WHERE project = $project AND copied_from <> ''
UNION SELECT trajectory, copied_from FROM rollout_signal WHERE project = $project AND copied_from <> ''
"""
"""Runs that have a call or a correction of another run, and that run."""
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
_VERSIONS = """
SELECT branch, model, version, parent, coalesce(source, ''), groups FROM policy_checkpoint WHERE project = $project
ORDER BY branch, model, step
"""
_ADDRESS = re.compile(r"(?P<lake>.+)#(?:(?:(?P<project>[^/#]+)/)?(?P<branch>[^/#]+)/)?(?P<version>[^/#]+)")
"""Of a version, as a checkpoint's `source` has it."""
_DATA_SET = re.compile(r"[a-z]+:sha256:(?P<sha256>[0-9a-f]{64})")
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
    """The person's runs that are deleted."""
    left: list[str] = []
    """Runs of the person that are not finished, and stay for the next erasure."""
    groups: list[Group] = []
    untrained: list[tuple[str, str, list[str]]] = []
    """Model, group and runs of the groups with runs of the person that wait for the trainer."""
    folders: list[str] = []
    """Data sets in the run directory with rows of the person's runs."""
    learned: list[str] = []
    """Versions that were trained on the person's runs, and all that descend from them: `<model>@<step>` on `main`,
    `<branch>/<model>@<step>` on another branch."""
    clean: dict[str, str] = {}
    """By model, the newest version of `main` that is not in `learned`; the base version if there is none."""
    outside: dict[str, str] = {}
    """By version, written as in `learned`, the lake, adapter or data set outside this history that it was made from."""
    messages: dict[str, int] = {}
    """By stream, the messages that are deleted."""
    objects: int = 0
    """Events among these messages that are in the object store."""
    rows: dict[str, int] = {}
    """By table of the lake, the rows that are deleted; for scored groups, the rows whose texts are deleted."""
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
    connection: duckdb.DuckDBPyConnection, config: Config, subject: str, *, untrained: bool, finished: bool = False
) -> Plan:
    """Return what the person's erasure reaches, with what an unfinished one had found. `untrained` says to discard the
    groups that wait for the trainer, which otherwise hold it up; `finished` to leave out whatever holds it up."""
    digest = digest_of(config, subject)
    journal = journal_of(config, digest)
    plan = (
        read_json(journal, Plan, "restore it; it lists what an erasure that did not end still has to delete")
        if journal.exists()
        else Plan(erasure=new_id("erasure"), digest=digest)
    )
    values: dict[str, Any] = {"project": config.project}
    runs = {*plan.runs, *_first_column(connection, _OF_PERSON, values | {"subject": subject})}
    copied = connection.execute(_COPIED, values).fetchall()
    while copies := {run for run, source in copied if source in runs} - runs:
        runs |= copies
    left: set[str] = set()
    if finished:
        left = _unfinished(connection, config, runs, untrained=untrained).difference(plan.runs)
    plan.left, runs = sorted(left), runs - left
    plan.runs = sorted(runs)
    values["runs"] = plan.runs
    holding = [
        ("runs that are open", _first_column(connection, _OPEN, values), "complete them first"),
        ("runs that wait for a judge", _first_column(connection, _UNJUDGED, values), "erase them when they are scored"),
    ]
    plan.untrained = [(m, g, t) for m, g, t in connection.execute(_UNTRAINED, values).fetchall()]
    if not untrained:
        way_out = "erase them when they are trained, or stop the trainer and add --untrained, which discards them"
        holding.append(("groups that wait for the trainer", [group for _, group, _ in plan.untrained], way_out))
    plan.held_up = [_held_up_sentence(what, names, way_out) for what, names, way_out in holding if names]
    groups = {Group(m, g) for m, g in connection.execute(_GROUPS, values).fetchall()}
    plan.groups = sorted({*plan.groups, *groups}, key=lambda g: (g.model, g.group))
    data_sets = list(_data_sets(Path(config.run_dir), runs))
    plan.folders = sorted({*plan.folders, *(str(found.folder) for found in data_sets if found.affected)})
    if plan.runs:
        _add_versions(connection, config, plan, data_sets)
    return plan


def _unfinished(connection: duckdb.DuckDBPyConnection, config: Config, runs: set[str], *, untrained: bool) -> set[str]:
    """Return those of the runs that are open or wait for a judge, or for the trainer unless `untrained`; and those
    whose calls or corrections they have: without these, nothing would tell that the copies are the person's."""
    values: dict[str, Any] = {"project": config.project, "runs": sorted(runs)}
    unfinished = {*_first_column(connection, _OPEN, values), *_first_column(connection, _UNJUDGED, values)}
    if not untrained:
        unfinished.update(*(members for _, _, members in connection.execute(_UNTRAINED, values).fetchall()))
    copied = connection.execute(_COPIED, {"project": config.project}).fetchall()
    while sources := {source for run, source in copied if run in unfinished} - unfinished:
        unfinished |= sources
    return unfinished & runs


def _add_versions(connection: duckdb.DuckDBPyConnection, config: Config, plan: Plan, data_sets: list[_DataSet]) -> None:
    """Set `learned`, `clean` and `outside` of the plan: the versions that learned from its runs, by model the newest
    one that did not, and what versions were made from outside this history."""
    rows = connection.execute(_VERSIONS, {"project": config.project}).fetchall()
    groups, own_data_sets = {(g.model, g.group) for g in plan.groups}, {d.sha256: d.trains for d in data_sets}
    names, main = dict[str, None](), list[tuple[str, str]]()
    learned = set(plan.learned)
    parents = list[tuple[str, str]]()
    """Versions with the version that each was made from."""
    for branch, model, version, parent, source, trained in rows:
        name, data_set = _version_name(branch, version), _DATA_SET.fullmatch(source)
        origin = _version_in_own_lake(source, config)
        names[name] = None
        if branch == "main":
            main.append((model, version))
        if any((model, group) in groups for group in trained) or (data_set and own_data_sets.get(data_set["sha256"])):
            learned.add(name)
        if origin or not source or data_set:  # a step on a data set continues its parent
            parents.append((name, origin or _version_name(branch, parent)))
        if source and not origin and not (data_set and data_set["sha256"] in own_data_sets):
            plan.outside[name] = source
    while more := {name for name, parent in parents if parent in learned} - learned:
        learned |= more
    plan.learned = [name for name in names if name in learned]
    affected = sorted({model for model, version in main if version in learned})
    clean = {model: version for model, version in main if version not in learned}
    plan.clean = {model: clean.get(model, f"{model}@0") for model in affected}


def _version_name(branch: str, version: str) -> str:
    """Return the name of a version as `Plan.learned` has it."""
    return version if branch == "main" else f"{branch}/{version}"


def _version_in_own_lake(source: str, config: Config) -> str:
    """Return the version of this history that a checkpoint's `source` names; empty if it names something else."""
    match = _ADDRESS.fullmatch(source)
    if match is None or (match["project"] and unquote(match["project"]) != config.project):
        return ""
    lake, own = match["lake"], config.store.dir
    if own.startswith(S3):
        same = lake.rstrip("/") == own.rstrip("/")
    else:
        same = Path(lake).resolve() in (Path(config.run_dir).resolve(), config.path(own).resolve())
    return _version_name(unquote(match["branch"] or "main"), unquote(match["version"])) if same else ""


@dataclass(frozen=True)
class _DataSet:
    """A data set that `journeywork dataset` wrote."""

    folder: Path
    affected: bool
    """Whether it has rows of the person's runs."""
    sha256: str = ""
    """Of its split `train`, if it has one."""
    trains: bool = False
    """Whether this split has such rows."""


def _data_sets(folder: Path, runs: set[str]) -> Iterator[_DataSet]:
    """Yield the data sets below a run directory."""
    for card in folder.rglob("README.md"):
        files = [file for split in SPLITS if (file := card.parent / f"{split}.parquet").is_file()]
        if not files or "journeywork dataset" not in card.read_text(errors="replace"):
            continue
        affected = {file.stem: bool(_runs_in(file) & runs) for file in files}
        yield _DataSet(
            card.parent,
            any(affected.values()),
            hashlib.sha256((card.parent / "train.parquet").read_bytes()).hexdigest() if "train" in affected else "",
            affected.get("train", False),
        )


def _runs_in(file: Path) -> set[str]:
    """Return the names of the runs in a data set's file. Raises `ConfigError` if it can't be read, because it may then
    hold the person's."""
    names: set[str] = set()
    try:
        rows: pa.Table = pq.read_table(file)
        for name in ("run", "runs"):
            if name in rows.column_names:
                for value in rows[name].to_pylist():
                    names.update([value] if isinstance(value, str) else value or ())
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read ({error}): mend, write again or delete it") from error
    return names


def _first_column(connection: duckdb.DuckDBPyConnection, query: str, values: dict[str, Any]) -> list[str]:
    """Return the values of a query's first column, as text."""
    return [str(row[0]) for row in connection.execute(query, values).fetchall()]


def _held_up_sentence(what: str, names: list[str], way_out: str) -> str:
    """Return a sentence of `Plan.held_up`: `what` holds the erasure up, ten at most of its `names`, and what to do."""
    shown = ", ".join(sorted(names)[:10]) + (", …" if len(names) > 10 else "")
    return f"{what} ({len(names)}: {shown}): {way_out}"
