"""`journeywork replay`: publishes groups of the history on a branch, to be trained or judged again.

    journeywork replay --branch colder --where "task = 'win' AND reward_mean < 0.5 AND decided_at >= '2026-11-01'"
    journeywork replay --branch again --where "project = 'shop' AND model = 'support'"

A replayed group is a `group.scored` event with the same members and verdicts, the new branch, `origin` (its branch and
sequence) and `offline = true`. Its trajectories keep their positions on the log and their recorded logprobs. If the log
no longer holds some of their events, these are published again from Parquet, on their old subjects. `--where` takes SQL
over the view `groups`. A branch holds a group once, so running the command again changes nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import anyio
import duckdb
import msgspec
import pyarrow as pa

from pipeline.config import ConfigError, NatsConfig
from pipeline.events import Event, GroupScored, TrajectoryCompleted, now_us
from pipeline.log.broker import Broker
from pipeline.log.subjects import keys_of
from pipeline.names import check_name
from pipeline.running.installations import installation_settings, log_of
from pipeline.streams import RETRY_HEADER
from pipeline.telemetry import logs
from pipeline.terminal.parsers import add_overrides, command_parser
from store.reading import rebuild, sql
from store.reading.options import add_installation, run_command


@dataclass(frozen=True)
class StoredGroup:
    """A group of the history and its sequence in GROUPS."""

    group: GroupScored
    seq: int


def select_groups(
    connection: duckdb.DuckDBPyConnection, where: str = "true", source: str = "main"
) -> list[StoredGroup]:
    """Return the scored groups of branch `source`, oldest first. `where`: SQL over the view `groups`. Raises
    `duckdb.Error` if `where` is not valid SQL."""
    query = f"""
        SELECT * FROM group_scored WHERE branch = $branch AND (project, log_seq, "group") IN (
          SELECT (project, stream_seq, group_id) FROM groups WHERE status = 'scored' AND ({where})
        )
        ORDER BY log_seq
    """  # noqa: S608 - `where` is SQL on purpose; the connection holds nothing but views
    table: pa.Table = connection.sql(query, params={"branch": source}).to_arrow_table()
    rows = zip(rebuild.events(GroupScored, table), table["log_seq"].to_pylist(), strict=True)
    return [StoredGroup(group, seq) for group, seq in rows]


def on_branch(
    stored: StoredGroup, branch: str, end_seqs: Mapping[str, int], others: Collection[str] = ()
) -> GroupScored:
    """Return the group as an event of `branch`. Its verdicts cost nothing, because they were paid for once.
    `end_seqs`: by trajectory, the present sequence of its `rollout.completed`. `others`: groups that are
    published with it."""
    group = stored.group
    origin = group.origin or f"{group.branch}/{stored.seq}"
    members = tuple(
        msgspec.structs.replace(m, completed_seq=end_seqs.get(m.trajectory, m.completed_seq)) for m in group.members
    )
    verdicts = tuple(msgspec.structs.replace(v, cost_usd=0.0) for v in group.verdicts)
    return msgspec.structs.replace(
        group,
        branch=branch,
        origin=origin,
        offline=True,
        closed_by="replay",
        members=members,
        verdicts=verdicts,
        batch=group.batch and group.batch.on_branch({group.group, *others}),
    )


async def republish_events(
    broker: Broker, connection: duckdb.DuckDBPyConnection, group: GroupScored
) -> tuple[int, dict[str, int]]:
    """Publish those events of a group's trajectories again that the log no longer holds. Return their number, and by
    trajectory the present sequence of its `rollout.completed`.

    A header makes every consumer skip these events, because they were consumed before. Readers of a trajectory's
    history get them."""
    published, end_seqs = 0, {}
    for member in group.members:
        stored = rebuild.trajectory(connection, group.project, member.trajectory)
        for events in _by_subject(stored):
            on_log = {r.event.message_id(): r.seq for r in await broker.read(type(events[0]), **keys_of(events[0]))}
            for event in events:
                seq = on_log.get(event.message_id())
                if seq is None:
                    again = f"put-back/{event.message_id()}/{now_us()}"
                    seq = (await broker.publish(event, {RETRY_HEADER: "replay"}, message_id=again)).seq
                    published += 1
                if isinstance(event, TrajectoryCompleted):
                    end_seqs[member.trajectory] = seq
    return published, end_seqs


def _by_subject(events: Iterable[Event]) -> Iterable[list[Event]]:
    """Return events in lists of one subject each, so that the log is asked once for each subject."""
    by_subject: dict[str, list[Event]] = {}
    for event in events:
        by_subject.setdefault(event.subject(), []).append(event)
    return by_subject.values()


async def replay(
    nats: NatsConfig, connection: duckdb.DuckDBPyConnection, groups: Sequence[StoredGroup], branch: str
) -> dict[str, int]:
    """Publish `groups` on `branch`. Return the number of new groups, of groups that the branch had already, and of
    events that were published again."""
    counts = {"groups": 0, "already": 0, "republished": 0}
    async with Broker.connect(nats, name="replay") as broker:
        # What the branch holds already waits, and is joined by the new groups of its batch, or was trained.
        ids_on_branch = {r.event.message_id() for r in await broker.read(GroupScored, branch=branch)}
        others: dict[tuple[str, str], set[str]] = {}
        for group in (on_branch(stored, branch, {}) for stored in groups):
            if group.message_id() not in ids_on_branch:
                others.setdefault((group.project, group.model), set()).add(group.group)
        for stored in groups:
            published, end_seqs = await republish_events(broker, connection, stored.group)
            counts["republished"] += published
            names = others.get((stored.group.project, stored.group.model), ())
            ack = await broker.publish(on_branch(stored, branch, end_seqs, names))
            counts["already" if ack.duplicate else "groups"] += 1
    return counts


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("replay", "Publish groups of the history on a branch.")
    parser.add_argument("--branch", required=True, help="name of the branch; not main")
    add_installation(parser)
    add_overrides(parser)
    parser.add_argument("--from-branch", default="main")
    parser.add_argument("--where", default="true", help="SQL over the view `groups`")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, or an error's status (`run_command`)."""
    logs.configure("replay", "ERROR")  # an error is printed as one line
    return run_command(_parser(), _run, argv)


def _run(args: argparse.Namespace) -> int:
    if check_name(args.branch) == args.from_branch or args.branch == "main":
        raise ConfigError(f"--branch {args.branch}: name a branch other than main and the one that is replayed")
    config = installation_settings(args.run_dir, args.config, args.overrides, sections=("nats", "store"))
    with sql.connect(config) as connection:
        groups = select_groups(connection, args.where, args.from_branch)
        counts = anyio.run(replay, log_of(config), connection, groups, args.branch)
    sys.stdout.write(msgspec.json.encode({**counts, "branch": args.branch}).decode() + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
