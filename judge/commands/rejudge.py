"""`journeyman rejudge`: score history again, with another judge or rubric, as a verdict set of its own.

    journeyman rejudge --run-dir runs/x --set judge.rubric=stricter.md [--branch NAME] [--limit N]

Every scored group of the branch it reads (`--from-branch`, `main` by default) is judged by the judge of the settings and published on another
branch, with its origin; the trainer reads `main` only, so nothing trains twice. Agents' own rewards are not passed
through here where a judge model is set: asking that model is the point. So is every group that the judge discarded as
unscored or too small, if this judge can score it: a judge model that was away, or was not set, is no reason to lose the
group. A group that is on the branch already is skipped, so the command can be stopped and run again. What the log no longer
holds is recorded as discarded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anyio
import msgspec
from rich.console import Console

from judge.commands.labelled import agreement
from judge.groups import Arrival, Group, GroupKey
from judge.rewards.compose import open_composer
from judge.scoring import Composer, Scores, UnscoredError, agents_own, judge_hash, member_of, score
from pipeline.config import Config, ConfigError, load
from pipeline.events import Event, GroupDiscarded, GroupScored, Member, TrajectoryCompleted, now_us
from pipeline.log.broker import Broker, BrokerError, HistoryGoneError, Recorded
from pipeline.names import InvalidNameError, check_name
from pipeline.telemetry.logs import get_logger

log = get_logger("judge.commands.rejudge")


def _name(event: object) -> tuple[str, str, str]:
    assert isinstance(event, GroupScored | GroupDiscarded)
    return event.model, event.group, event.split


@dataclass
class Report:
    """What became of the groups."""

    branch: str
    judge: str
    rejudged: int = 0
    skipped: int = 0
    failed: int = 0
    gone: int = 0
    rescued: int = 0
    """Of the rejudged ones, those that had been discarded."""
    pairs: list[tuple[dict[str, float], dict[str, float]]] = field(default_factory=list)
    """Old and new rewards of each group."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "branch": self.branch,
            "judge": self.judge,
            "rejudged": self.rejudged,
            "skipped": self.skipped,
            "failed": self.failed,
            "gone": self.gone,
            "rescued": self.rescued,
            "agreement_with_before": asdict(agreement(self.pairs)),
        }


class Rejudge:
    """One verdict set in the making."""

    def __init__(
        self,
        broker: Broker,
        config: Config,
        composer: Composer | None,
        *,
        branch: str = "",
        source: str = "main",
    ) -> None:
        """`branch` is named after the judge where it is empty. Raises `ConfigError` if it is the one it reads."""
        self._broker, self._config, self._composer, self._source = broker, config, composer, source
        judge = judge_hash(config.judge)
        self.report = Report(branch or f"judge-{judge}", judge)
        if self.report.branch in (source, "main"):
            raise ConfigError(f"a verdict set needs a branch of its own, not {self.report.branch!r}")

    async def run(self, limit: int = 0) -> Report:
        """Judge the newest `limit` groups (0: all), `judge.concurrency` at once."""
        history = await self._broker.read(GroupScored, project=self._config.project)
        found: list[Recorded[Event]] = [r for r in history if r.event.branch == self._source]
        done = {
            (r.event.model, r.event.group, r.event.split)
            for r in history
            if (r.event.branch, r.event.judge) == (self.report.branch, self.report.judge)
        }
        found += await self._discarded({_name(r.event) for r in found})
        found.sort(key=lambda r: r.seq)
        slots = anyio.CapacityLimiter(self._config.judge.concurrency)

        async def one(recorded: Recorded[Event]) -> None:
            async with slots:
                match recorded.event:
                    case GroupScored() as event:
                        await self._group(recorded, event)
                    case GroupDiscarded() as event:
                        await self._rescue(recorded, event)

        async with anyio.create_task_group() as tg:
            for recorded in found[-limit:] if limit else found:
                if _name(recorded.event) in done:
                    self.report.skipped += 1
                else:
                    tg.start_soon(one, recorded)
        return self.report

    async def _discarded(self, scored: set[tuple[str, str, str]]) -> list[Recorded[GroupDiscarded]]:
        """What the judge discarded for want of scores, but for groups that are scored too."""
        history = await self._broker.read(GroupDiscarded, project=self._config.project)
        return [
            r
            for r in history
            if (r.event.by, r.event.branch) == ("judge", self._source)
            and r.event.reason in ("unscored", "too_small")
            and _name(r.event) not in scored
        ]

    async def _rescue(self, recorded: Recorded[Event], event: GroupDiscarded) -> None:
        """Score a group that was discarded, where this judge can."""
        group = Group(
            GroupKey(event.project, event.model, event.group, event.split), 0.0, closed_by="timeout"
        )
        for trajectory in event.trajectories:
            completed = await self._completion(event, trajectory)
            if completed is None:
                self.report.gone += 1
                await self._discard(event, f"the end of trajectory {trajectory}")
                return
            group.arrivals[trajectory] = Arrival(*completed, [])
        result = await score(group, self._config.judge, self.report.judge, self._composer)
        if isinstance(result, GroupDiscarded):
            self.report.failed += result.reason == "unscored"
            log.info("still not scored", group=event.group, reason=result.reason, detail=result.detail[:300])
            return
        await self._broker.publish(
            msgspec.structs.replace(
                result, branch=self.report.branch, closed_by="replay", offline=True,
                origin=f"{self._source}/{recorded.seq}",
            )
        )  # fmt: skip
        self.report.rejudged += 1
        self.report.rescued += 1

    async def _completion(
        self, event: GroupScored | GroupDiscarded, trajectory: str
    ) -> tuple[TrajectoryCompleted, int] | None:
        completed = await self._broker.read(
            TrajectoryCompleted, project=event.project, model=event.model, trajectory=trajectory
        )
        return (completed[0].event, completed[0].seq) if completed else None

    async def _group(self, recorded: Recorded[Event], event: GroupScored) -> None:
        try:
            members = {
                m.trajectory: await self._completed(event, m)
                for m in event.members
                if m.outcome != "no_result"
            }
            scorable = [m for m in members.values() if m.outcome == "scored"]
            scores = await self._score(scorable)
        except HistoryGoneError as error:
            self.report.gone += 1
            await self._discard(event, str(error))
            return
        except UnscoredError as error:
            self.report.failed += 1
            log.error("not rejudged", group=event.group, reason=str(error)[:300])
            return
        if len(scores.final) < 2 and event.split == "train":
            self.report.failed += 1
            log.error(
                "not rejudged", group=event.group, reason=scores.missing or "fewer than 2 have a reward"
            )
            return
        rejudged = tuple(
            member_of(members[m.trajectory], m.completed_seq, scores) if m.trajectory in members else m
            for m in event.members
        )
        await self._broker.publish(
            msgspec.structs.replace(
                event, at=now_us(), judge=self.report.judge,
                branch=self.report.branch, members=rejudged, verdicts=scores.verdicts, closed_by="replay", offline=True,
                origin=f"{self._source}/{recorded.seq}",
            )
        )  # fmt: skip
        self.report.rejudged += 1
        before = {m.trajectory: m.reward for m in event.members if m.outcome == "scored"}
        shared = before.keys() & scores.final.keys()
        self.report.pairs.append(({t: before[t] for t in shared}, {t: scores.final[t] for t in shared}))

    async def _score(self, members: Sequence[TrajectoryCompleted]) -> Scores:
        return agents_own(members) if self._composer is None else await self._composer(members)

    async def _completed(self, event: GroupScored, member: Member) -> TrajectoryCompleted:
        """How a member of `event` ended. Raises `HistoryGoneError` where the log does not say."""
        try:
            found = (await self._broker.read_at(TrajectoryCompleted, member.completed_seq)).event
        except HistoryGoneError:
            found = None
        if found is not None and found.trajectory == member.trajectory:
            return found
        # After a power cut the number may stand for another event; the subject is the trajectory's own.
        again = await self._completion(event, member.trajectory)
        if again is None:
            raise HistoryGoneError(f"the end of trajectory {member.trajectory}")
        return again[0]

    async def _discard(self, event: GroupScored | GroupDiscarded, detail: str) -> None:
        members = (
            tuple(m.trajectory for m in event.members)
            if isinstance(event, GroupScored)
            else event.trajectories
        )
        await self._broker.publish(
            GroupDiscarded(
                project=event.project, model=event.model, group=event.group, split=event.split,
                trajectories=members, reason="history_gone", by="rejudge",
                detail=detail, branch=self.report.branch,
            )
        )  # fmt: skip


async def _run(config: Config, branch: str, source: str, limit: int) -> Report:
    async with (
        Broker.connect(config.nats, name="rejudge", provision=False) as broker,
        open_composer(config, broker) as composer,
    ):
        return await Rejudge(broker, config, composer, branch=branch, source=source).run(limit)


def settings(run_dir: str, file: str, overrides: Sequence[str], nats_url: str) -> Config:
    """Settings of a run (or of a file), with the address of the log that the run uses. Raises `ConfigError`."""
    folder = Path(run_dir) if run_dir else None
    if not file and folder is not None and (folder / "config.toml").exists():
        file = str(folder / "config.toml")
    more = list(overrides)
    if not nats_url and folder is not None and (folder / "state.json").exists():
        nats_url = msgspec.json.decode((folder / "state.json").read_bytes())["urls"]["nats"]
    if nats_url:
        more.append("nats.url=" + msgspec.json.encode(nats_url).decode())
    config = load(file or None, more)
    if not config.nats.url:
        raise ConfigError("which log? name it with --run-dir, --nats-url or nats.url in the settings")
    return config


def main(argv: Sequence[str] | None = None) -> None:
    """The command; exits 1 where a group could not be judged, 2 on settings that can't be used."""
    parser = argparse.ArgumentParser(
        prog="journeyman rejudge", description="Score history again as a new verdict set."
    )
    parser.add_argument("--run-dir", default="", help="the run whose settings and log to use")
    parser.add_argument("--config", default="", help="settings, TOML; default: the run's")
    parser.add_argument("--nats-url", default="", help="the log; default: the run's")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", dest="overrides")
    parser.add_argument("--branch", default="", help="name of the verdict set; default: judge-<hash>")
    parser.add_argument("--from-branch", default="main", help="line of history to judge again")
    parser.add_argument("--limit", type=int, default=0, help="only the newest N groups")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        if args.branch:
            check_name(args.branch)
        config = settings(args.run_dir, args.config, args.overrides, args.nats_url)
        report = anyio.run(_run, config, args.branch, args.from_branch, args.limit)
    except (ConfigError, BrokerError, InvalidNameError) as error:
        sys.stderr.write(f"journeyman: {error}\n")
        raise SystemExit(1 if isinstance(error, BrokerError) else 2) from error
    console = Console(highlight=False)
    if args.json:
        console.print_json(msgspec.json.encode(report.as_dict()).decode())
    else:
        console.print(
            f"{report.rejudged} groups judged again on branch {report.branch} ({report.rescued} of them had been "
            f"discarded); {report.skipped} were there already, "
            f"{report.failed} failed, {report.gone} are no longer in the log"
        )
        console.print(f"agreement with the rewards before: {agreement(report.pairs)}")
    if report.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
