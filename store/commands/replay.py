"""`journeywork replay`: publishes groups of the history on a branch, to be trained or judged again.

    journeywork replay --branch colder --since 2026-11-01 --where "task = 'win' AND reward_mean < 0.5"
    journeywork replay --branch again --project shop --model support --dry-run

A replayed group is a `group.scored` event with the same members and verdicts, the new branch, `origin` (its branch and
sequence) and `offline = true`. Its trajectories keep their positions on the log and their recorded logprobs. If the log
no longer holds some of their events, these are published again from Parquet, on their old subjects. `--where` takes SQL
over the view `groups`. A branch holds a group once, so running the command again changes nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import duckdb
import msgspec
import pyarrow as pa

from pipeline.config import ConfigError, NatsConfig
from pipeline.events import Event, GroupScored, TrajectoryCompleted, now_us
from pipeline.log.broker import Broker, BrokerError
from pipeline.log.subjects import keys_of
from pipeline.names import check_name
from pipeline.running.runs import log_of, run_settings
from pipeline.streams import RETRY_HEADER
from pipeline.telemetry import logs
from store.lake.storage import StoreError
from store.reading import rebuild, sql


@dataclass(frozen=True)
class StoredGroup:
    """A group of the history and its sequence in GROUPS."""

    group: GroupScored
    seq: int


def select_groups(
    connection: duckdb.DuckDBPyConnection,
    *,
    project: str = "",
    model: str = "",
    source: str = "main",
    since: str = "",
    until: str = "",
    where: str = "true",
    limit: int = 0,
) -> list[StoredGroup]:
    """Return the scored groups of branch `source`, oldest first. `since`, `until`: SQL timestamps, UTC. `where`: SQL
    over the view `groups`. `limit`: maximum number of groups; 0 for all. Raises `duckdb.Error` if `where` is not valid
    SQL."""
    query = f"""
        SELECT s.* FROM group_scored s
        JOIN groups g ON g.status = 'scored' AND g.project = s.project AND g.stream_seq = s.log_seq
          AND g.group_id = s."group"
        WHERE s.branch = ? AND (? = '' OR s.project = ?) AND (? = '' OR s.model = ?)
          AND (? = '' OR s."at" >= TRY_CAST(? AS TIMESTAMP)) AND (? = '' OR s."at" < TRY_CAST(? AS TIMESTAMP))
          AND (s.log_seq, s."group") IN (
            SELECT (stream_seq, group_id) FROM groups WHERE status = 'scored' AND ({where})
          )
        ORDER BY s.log_seq
    """  # noqa: S608 - `where` is SQL on purpose; the connection holds nothing but views
    values = [source, project, project, model, model, since, since, until, until]
    if limit:
        query += f" LIMIT {int(limit)}"
    table: pa.Table = connection.sql(query, params=values).to_arrow_table()
    rows = zip(rebuild.events(GroupScored, table), table["log_seq"].to_pylist(), strict=True)
    return [StoredGroup(group, seq) for group, seq in rows]


def on_branch(chosen: StoredGroup, branch: str, ends: Mapping[str, int]) -> GroupScored:
    """Return the group as an event of `branch`. `ends`: by trajectory, the present sequence of its
    `rollout.completed`."""
    group = chosen.group
    origin = group.origin or f"{group.branch}/{chosen.seq}"
    members = tuple(
        msgspec.structs.replace(m, completed_seq=ends.get(m.trajectory, m.completed_seq))
        for m in group.members
    )
    return msgspec.structs.replace(
        group, branch=branch, origin=origin, offline=True, closed_by="replay", members=members
    )


async def republish_events(
    broker: Broker, connection: duckdb.DuckDBPyConnection, group: GroupScored
) -> tuple[int, dict[str, int]]:
    """Publish those events of a group's trajectories again that the log no longer holds. Return their number, and by
    trajectory the present sequence of its `rollout.completed`.

    A header makes every consumer skip these events, because they were consumed before. Readers of a trajectory's
    history get them."""
    published, ends = 0, {}
    for member in group.members:
        kept = rebuild.trajectory(connection, group.project, member.trajectory)
        for events in _by_subject(kept):
            held = {
                r.event.message_id(): r.seq for r in await broker.read(type(events[0]), **keys_of(events[0]))
            }
            for event in events:
                seq = held.get(event.message_id())
                if seq is None:
                    again = f"put-back/{event.message_id()}/{now_us()}"
                    seq = (await broker.publish(event, {RETRY_HEADER: "replay"}, message_id=again)).seq
                    published += 1
                if isinstance(event, TrajectoryCompleted):
                    ends[member.trajectory] = seq
    return published, ends


def _by_subject(events: Iterable[Event]) -> Iterable[list[Event]]:
    out: dict[str, list[Event]] = {}
    for event in events:
        out.setdefault(event.subject(), []).append(event)
    return out.values()


async def replay(
    nats: NatsConfig, connection: duckdb.DuckDBPyConnection, groups: Sequence[StoredGroup], branch: str
) -> dict[str, int]:
    """Publish `groups` on `branch`. Return the number of new groups, of groups that the branch had already, and of
    events that were published again."""
    counts = {"groups": 0, "already": 0, "republished": 0}
    async with Broker.connect(nats, name="replay") as broker:
        for chosen in groups:
            published, ends = await republish_events(broker, connection, chosen.group)
            counts["republished"] += published
            ack = await broker.publish(on_branch(chosen, branch, ends))
            counts["already" if ack.duplicate else "groups"] += 1
    return counts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="journeywork replay", description="Publish groups of the history on a branch."
    )
    parser.add_argument("--branch", required=True, help="name of the branch; not main")
    parser.add_argument(
        "--run-dir", help="run whose history is replayed; default: the running one, else the newest"
    )
    parser.add_argument("--config", help="settings of that run")
    parser.add_argument("--nats-url", help="log to replay onto; default: the run's own")
    parser.add_argument("--project", default="")
    parser.add_argument("--model", default="")
    parser.add_argument("--from-branch", default="main")
    parser.add_argument("--since", default="", help="UTC, such as 2026-11-01 or 2026-11-01 12:00")
    parser.add_argument("--until", default="")
    parser.add_argument("--where", default="true", help="SQL over the view `groups`")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument(
        "--dry-run", action="store_true", help="print which groups would be replayed, and publish nothing"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 on success, 1 if the store, the log or the query fails, 2 if an argument or a setting
    is wrong."""
    args = _parser().parse_args(argv)
    logs.configure("replay", "ERROR")  # an error is printed as one line
    try:
        counts: dict[str, Any] = _main(args)
    except (StoreError, BrokerError, duckdb.Error) as error:
        sys.stderr.write(f"journeywork: {error}\n")
        return 1
    except (ConfigError, ValueError) as error:
        sys.stderr.write(f"journeywork: {error}\n")
        return 2
    sys.stdout.write(msgspec.json.encode(counts).decode() + "\n")
    return 0


def _main(args: argparse.Namespace) -> dict[str, Any]:
    if check_name(args.branch) == args.from_branch or args.branch == "main":
        raise ConfigError(
            f"--branch {args.branch}: name a branch other than main and the one that is replayed"
        )
    for name in ("since", "until"):
        _check_time(name, getattr(args, name))
    config = run_settings(args.run_dir, args.config, nats_url=args.nats_url, sections=("nats", "store"))
    with sql.connect(config) as connection:
        chosen = select_groups(
            connection,
            project=args.project,
            model=args.model,
            source=args.from_branch,
            since=args.since,
            until=args.until,
            where=args.where,
            limit=args.limit,
        )
        if args.dry_run:
            return {"groups": len(chosen), "ids": [c.group.group for c in chosen]}
        return anyio.run(replay, log_of(config), connection, chosen, args.branch) | {"branch": args.branch}


def _check_time(name: str, text: str) -> None:
    with duckdb.connect() as connection:
        (row,) = connection.execute("SELECT TRY_CAST(? AS TIMESTAMP)", [text]).fetchall()
    if text and row[0] is None:
        raise ConfigError(f"--{name} {text!r} is not a time: write 2026-11-01 or 2026-11-01 12:00 (UTC)")


if __name__ == "__main__":
    raise SystemExit(main())
