"""`journeywork rejudge`: score history again with another judge or rubric, as a verdict set of its own.

    journeywork rejudge --run-dir runs/x --set judge.rubric=stricter.md [--branch NAME] [--limit N]
    journeywork rejudge --run-dir runs/x --config labels.toml --branch main --verdicts labels-1 --since 2026-11-20

Every scored group of one branch (`--from-branch`) is judged by the judge of the settings and published on another
branch, with its origin. The trainer reads `main` only, so nothing trains twice. With `--branch main` the groups of
`main` train once more, each once under every verdict set: what has the same `--verdicts`, or without that the same
judge configuration, is one set. Only groups as they were first scored are judged again, so as long as the log holds
one of them, it holds the newer event of each set, and the command can tell.

If a judge model is set, it is asked even if agents gave rewards. Feedback that came late counts, under rewards of kind
`feedback`. Groups that the judge discarded as unscored, too small or over budget are scored too if this judge can. A
group that is on the branch already is skipped, so the command can be stopped and run again. A group that the log no
longer holds is recorded as discarded, and on another branch than `main` one that this judge can't score, so that no
batch there waits for it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import anyio
import msgspec

from judge import scoring
from judge.errors import UnscoredError
from judge.feedback import counted_signals
from judge.groups import Group, GroupKey
from judge.rewards.compose import open_composer_on_log
from judge.teacher import open_teacher
from pipeline.concurrency.concurrently import concurrently
from pipeline.config import Config, ConfigError
from pipeline.events import GroupDiscarded, GroupScored, SignalGiven, TrainingBatch, TrajectoryCompleted, now_us
from pipeline.events.group import DiscardReason
from pipeline.log.broker import Broker, BrokerError, HistoryGoneError, LogEntry
from pipeline.names import InvalidNameError, check_name
from pipeline.running.installations import installation_settings, log_of
from pipeline.telemetry import logs
from pipeline.terminal.parsers import add_overrides, command_parser, exit_on_error

logger = logs.get_logger("judge.commands.rejudge")

GroupEvent = GroupScored | GroupDiscarded


@dataclass
class RejudgeReport:
    """How many groups had which result."""

    branch: str
    verdict_set: str
    rejudged: int = 0
    skipped: int = 0
    failed: int = 0
    gone: int = 0
    rescued: int = 0
    """Number of rejudged groups that the judge had discarded."""


class Rejudge:
    """Makes one verdict set."""

    def __init__(
        self,
        broker: Broker,
        config: Config,
        compose: scoring.Compose | None,
        teach: scoring.AskTeacher | None = None,
        *,
        branch: str = "",
        from_branch: str = "main",
        verdicts: str = "",
    ) -> None:
        """The groups of `from_branch` are judged again, and published on `branch`, by default `judge-<verdict set>`.
        `verdicts` names the verdict set, by default the hash of the judge configuration. Raises `ConfigError` if
        `branch` is `from_branch`, unless both are `main`, or if it is `main` alone."""
        self._broker, self._config, self._compose, self._from_branch = broker, config, compose, from_branch
        self._teach = teach
        verdict_set = verdicts or scoring.judge_hash(config.judge)
        self._judged_again: set[tuple[str, str]] = set()
        """Model and id of the groups that `run` judges again."""
        self.report = RejudgeReport(branch or f"judge-{verdict_set}", verdict_set)
        if from_branch != "main" and self.report.branch in (from_branch, "main"):
            raise ConfigError(
                f"--branch {self.report.branch}: name a branch other than the one that is judged again; only groups of "
                "main can be judged again on main"
            )

    async def run(self, limit: int = 0, since: int = 0, until: int = sys.maxsize) -> RejudgeReport:
        """Judge the newest `limit` groups (0: all) of those that were scored or discarded from `since` to before
        `until`, in microseconds since 1970; `judge.concurrency` at once."""
        project = self._config.project
        history = await self._broker.read(GroupScored, project=project)
        this_set = self.report.branch, self.report.verdict_set
        done = {_group_of(r.event) for r in history if (r.event.branch, r.event.judge) == this_set}
        # Groups as they were first scored: those of other verdict sets name one of this branch as their origin.
        scored = {
            _group_of(r.event): r
            for r in history
            if r.event.branch == self._from_branch and not r.event.origin.startswith(f"{self._from_branch}/")
        }
        discarded = [
            r
            for r in await self._broker.read(GroupDiscarded, project=project)
            if (r.event.by, r.event.branch) == ("judge", self._from_branch)
            and r.event.reason in ("unscored", "too_small", "over_budget")
            and _group_of(r.event) not in scored
        ]
        candidates: list[LogEntry[Any]] = [*scored.values(), *discarded]
        candidates = [
            r
            for r in candidates
            # On main, validation runs would count again in the choice of the best version.
            if since <= r.event.at < until and (self.report.branch != "main" or r.event.split == "train")
        ]
        newest = sorted(candidates, key=lambda recorded: recorded.seq)[-limit:]
        to_judge = [r for r in newest if _group_of(r.event) not in done]
        self._judged_again = {_group_of(r.event)[:2] for r in to_judge}
        self.report.skipped = len(newest) - len(to_judge)
        await concurrently(self._rejudge, to_judge, self._config.judge.concurrency)
        return self.report

    async def _rejudge(self, recorded: LogEntry[GroupScored] | LogEntry[GroupDiscarded]) -> None:
        """Judge one group again, or record why that was not possible."""
        event = recorded.event
        try:
            if isinstance(event, GroupScored):
                await self._score(recorded.seq, event)
            else:
                await self._rescue(recorded.seq, event)
        except HistoryGoneError as error:
            self.report.gone += 1
            await self._publish_discard(event, "history_gone", str(error))
        except UnscoredError as error:
            await self._fail(event, "unscored", str(error))

    async def _rescue(self, seq: int, event: GroupDiscarded) -> None:
        """Score a group that was discarded at the sequence `seq`, if this judge can, and publish it; else record that
        it could not. Counts it in the report, unless it is still too small. Raises `HistoryGoneError` if the log lacks
        a member's completion."""
        key = GroupKey(event.project, event.model, event.group, event.split)
        completions = [await self._completed(event, trajectory) for trajectory in event.trajectories]
        members = tuple(sorted(completions, key=lambda completion: completion.seq))
        group = Group(key, members, signals=await self._signals(event))
        result = await scoring.score_closed(
            group, self._config.judge, self.report.verdict_set, self._compose, self._teach
        )
        if isinstance(result, GroupScored):
            await self._publish_scored(seq, result)
            self.report.rescued += 1
        else:
            await self._fail(event, result.reason, result.detail)

    async def _score(self, seq: int, event: GroupScored) -> None:
        """Score a group that was published at the sequence `seq` again, and publish it. Raises `HistoryGoneError` if
        the log lacks a member's completion, and `UnscoredError` if too few members have a reward."""
        with_result = [m for m in event.members if m.outcome != "no_result"]
        completions = [await self._completed(event, m.trajectory, m.completed_seq) for m in with_result]
        members = {r.event.trajectory: r.event for r in completions}
        scorable = [m for m in members.values() if m.outcome == "scored"]
        signals = await self._signals(event)
        if self._compose is not None and scorable:
            rewards = await self._compose(scorable, signals)
        else:
            rewards = scoring.agent_rewards(scorable)
        rewards = replace(rewards, taught={m.trajectory: m.teacher for m in event.members if m.teacher})
        rewards = await scoring.with_hints_and_answers(rewards, scorable, signals, self._config.judge, self._teach)
        needed = 1 if event.split == "val" else self._config.judge.min_size
        # The trainer gets every group of a batch, as from the judge.
        if len(rewards.final) < needed and self._batch_of(event) is None:
            raise UnscoredError(rewards.missing or f"{len(rewards.final)} have a reward, {needed} are needed")
        rejudged = tuple(
            scoring.make_member(members[m.trajectory], m.completed_seq, rewards) if m.trajectory in members else m
            for m in event.members
        )
        new = {"members": rejudged, "verdicts": rewards.verdicts}
        await self._publish_scored(seq, msgspec.structs.replace(event, at=now_us(), **new))

    async def _signals(self, event: GroupEvent) -> tuple[SignalGiven, ...]:
        """Return the signals about the group's runs that count under these settings, also those that came after it was
        scored."""
        names: dict[str, Any] = {"project": event.project, "model": event.model, "group": event.group}
        signals = [r.event for r in await self._broker.read(SignalGiven, **names)]
        return tuple(counted_signals(signals, self._config.judge))

    async def _completed(self, event: GroupEvent, run: str, seq: int = 0) -> LogEntry[TrajectoryCompleted]:
        """Return the completion of a run of the group, which was recorded at `seq` (0: unknown). Raises
        `HistoryGoneError` if the log does not hold it."""
        with suppress(HistoryGoneError):  # then it is looked for by its subject
            at = await self._broker.read_at(TrajectoryCompleted, seq) if seq else None
            if at is not None and at.event.trajectory == run:
                return at
        # After a power cut the sequence may be that of another event. The subject is the trajectory's own.
        completed = await self._broker.read_last(
            TrajectoryCompleted, project=event.project, model=event.model, group_key=event.group, trajectory=run
        )
        if completed is None:
            raise HistoryGoneError(f"the end of trajectory {run}")
        return completed

    def _batch_of(self, event: GroupScored) -> TrainingBatch | None:
        """Return the requested batch of a group as it is on the branch of the new verdicts: with the groups that are
        judged again. `None` if it has none, and on main, where the batch was trained already."""
        if event.batch is None or self.report.branch == "main":
            return None
        return event.batch.on_branch({group for model, group in self._judged_again if model == event.model})

    async def _publish_scored(self, seq: int, event: GroupScored) -> None:
        """Publish a group under its new verdicts. `seq`: of the event that it was judged again from."""
        await self._broker.publish(
            msgspec.structs.replace(
                event,
                branch=self.report.branch,
                judge=self.report.verdict_set,
                closed_by="replay",
                offline=True,
                origin=f"{self._from_branch}/{seq}",
                batch=self._batch_of(event),
            )
        )
        self.report.rejudged += 1

    async def _fail(self, event: GroupEvent, reason: DiscardReason, detail: str) -> None:
        """Log that this judge could not score a group, and discard it on the branch, so that no batch there waits for
        it."""
        self.report.failed += reason == "unscored"
        write = logger.error if reason == "unscored" else logger.info
        write("not rejudged", group=event.group, reason=reason, detail=detail[:300])
        if self.report.branch != "main":  # there, the group's earlier verdicts stay in use
            await self._publish_discard(event, reason, detail)

    async def _publish_discard(self, event: GroupEvent, reason: DiscardReason, detail: str) -> None:
        """Publish on the branch of the new verdicts that a group is discarded there, with the reason."""
        fields: dict[str, Any] = {"by": "rejudge", "reason": reason, "detail": detail}
        fields |= {"branch": self.report.branch, "judge": self.report.verdict_set}
        if isinstance(event, GroupScored):
            await self._broker.publish(event.discarded(**fields))
        else:
            await self._broker.publish(msgspec.structs.replace(event, at=now_us(), **fields))


def _group_of(event: GroupEvent) -> tuple[str, str, str]:
    """Return what names a group on any branch: its model, id and split."""
    return event.model, event.group, event.split


async def _run(config: Config, args: argparse.Namespace) -> RejudgeReport:
    """Run the command against the log of the settings."""
    async with (
        Broker.connect(config.nats, name="rejudge", provision=False) as broker,
        open_composer_on_log(config, broker) as composer,
        open_teacher(config, broker) as teacher,
    ):
        rejudge = Rejudge(
            broker, config, composer, teacher, branch=args.branch, from_branch=args.from_branch, verdicts=args.verdicts
        )
        return await rejudge.run(args.limit, args.since, args.until)


def _parse_time(text: str) -> int:
    """Return a time in ISO 8601, UTC where it names no zone, in microseconds since 1970. Raises `ValueError`."""
    at = datetime.fromisoformat(text)
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1e6)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Exits 1 if a group could not be judged or the log fails, 2 if the settings cannot be used."""
    parser = command_parser("rejudge", "Score history again as a new verdict set.")
    parser.add_argument("--run-dir", help="default: the running one under runs/, else the newest")
    parser.add_argument("--config", default="", help="settings, TOML; default: the run's")
    add_overrides(parser)
    parser.add_argument("--branch", default="", help="branch of the new verdicts; default: judge-<verdict set>")
    parser.add_argument("--from-branch", default="main", help="branch whose groups are judged again")
    parser.add_argument("--verdicts", default="", help="verdict set's name; default: hash of the judge configuration")
    parser.add_argument("--since", type=_parse_time, default=0, help="only groups from then on, ISO 8601")
    parser.add_argument("--until", type=_parse_time, default=sys.maxsize, help="only groups before that")
    parser.add_argument("--limit", type=int, default=0, help="only the newest N groups")
    args = parser.parse_args(argv)
    logs.configure("rejudge", "WARNING")
    with exit_on_error("rejudge", (ConfigError, InvalidNameError), (BrokerError,)):
        for name in filter(None, (args.branch, args.verdicts)):
            check_name(name)
        config = installation_settings(args.run_dir, args.config, args.overrides)
        log_of(config)
        report = anyio.run(_run, config, args)
    text = (
        f"{report.rejudged} groups judged again on branch {report.branch} ({report.rescued} of them had been "
        f"discarded); {report.skipped} were there already, {report.failed} failed, {report.gone} are no longer in the "
        "log"
    )
    sys.stdout.write(text + "\n")
    if report.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
