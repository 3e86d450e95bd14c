"""`journeywork status`: processes, lag, policy versions and alarms of an installation, once.

`show` collects a dict, which `--json` prints as it is: `state.json` (`pipeline.running.state`), what the log tells
(`read_log`), and what the store says of the history. *Lag* is what a consumer has not acknowledged: `behind` what it
was not given yet, `held` what it is handling."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline import streams
from pipeline.config import ConfigError, NatsConfig
from pipeline.events import (
    AlarmChanged,
    CheckpointPublished,
    FeedbackTimedOut,
    GroupDiscarded,
    GroupScored,
    GroupTimedOut,
    PolicyPromoted,
    standing_decisions,
)
from pipeline.log.broker import Broker, BrokerError, LogEntry
from pipeline.names import branch_model, version_name
from pipeline.running.installations import installation_settings, log_of
from pipeline.running.state import read_state
from pipeline.security.signing import Trust
from pipeline.telemetry import logs
from pipeline.terminal.printing import with_code

_NEWEST = (256, 1024, 4096)
"""Messages at the end of GROUPS that are read, the next number where the ones before hold no training group."""
_STORE_S = 20
"""Time in which the store has to answer: what the processes and the log say must not wait for it."""


def show(run_dir: Path, console: Console, *, as_json: bool = False) -> None:
    """Print the state of the installation. Raises `ConfigError` where nothing was started, and `SystemExit` with 1
    where a process is gone or the log does not answer."""
    present = read_state(run_dir)
    if present is None:
        raise ConfigError(f"{run_dir} holds no state.json: nothing was started there")
    state = msgspec.to_builtins(present) | {"running": present.running}
    logs.configure("status", "CRITICAL")  # errors are printed as one line
    config = installation_settings(run_dir, sections=("nats", "signing"))
    state["history"] = _history_sentences(run_dir) if "store" in state["services"] else []
    if state["services"].get("nats", {}).get("state") == "stopped":
        state["log"] = "it was stopped with the run"  # another run's log may have its port now
    else:
        try:
            state |= anyio.run(read_log, log_of(config), Trust(config.signing), config.project)
        except BrokerError as error:
            state["log"] = str(error)
    running = {n for n, s in state["services"].items() if s["state"] not in ("stopped", "gone")}
    if "lag" in state:
        # A consumer's name begins with the service that takes from it. That of a service which does not run is `off`:
        # its lag is no fault.
        rows = [(row["consumer"].partition("-")[0], row) for row in state["lag"]]
        state["lag"] = [row | {"off": name not in running} for name, row in rows if name in state["services"]]
    if as_json:
        console.print_json(msgspec.json.encode(state).decode())
    else:
        _print(run_dir, state, console)
    if "lag" not in state or any(s["state"] == "gone" for s in state["services"].values()):
        raise SystemExit(1)


def _history_sentences(run_dir: Path) -> list[str]:
    """Return what the store says of apprentices, rewards and speed, in sentences. It runs as a program of its own: this
    package imports no service."""
    command = [sys.executable, "-m", "store.showing.pages.status", str(run_dir)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_STORE_S, check=False)
    except subprocess.TimeoutExpired:
        return [f"The store was not read within {_STORE_S} s."]
    if answer.returncode:
        return [f"The store can't be read: {answer.stderr[-300:]}"]
    return answer.stdout.splitlines()


async def read_log(nats: NatsConfig, trust: Trust, project: str) -> dict[str, Any]:
    """Return what the log tells: lag, the project's newest policy version of each model and branch, the decisions that
    stand, alarms. Raises `BrokerError`."""
    nats = msgspec.structs.replace(nats, publish_deadline_s=min(nats.publish_deadline_s, 10.0))
    async with Broker.connect(nats, name="status", provision=False) as broker:
        policies = {}
        for recorded in await broker.read(CheckpointPublished, project=project):
            if not trust.objection(version := recorded.event):
                on_main = version.branch == "main"
                model = version.model if on_main else branch_model(version.model, version.branch)
                policies[model] = version_name(model, version.step)
        waiting = {
            what: len(await broker.subjects("TIMERS", f"{streams.TIMER_SET}.{timer.subject_prefix()}.>"))
            for what, timer in (("members", GroupTimedOut), ("feedback", FeedbackTimedOut))
        }
        return {
            "lag": [await _lag(broker, consumer) for consumer in streams.CONSUMERS],
            "policies": policies,
            "decided": await _decisions_in_force(broker, project),
            # Groups that the judge keeps open, by what they wait for.
            "waiting": waiting,
            "groups": await _newest_groups(broker, project),
            "raised": await _raised_alarms(broker),
        }


async def _lag(broker: Broker, consumer: streams.ConsumerSpec) -> dict[str, Any]:
    """Return the name of a consumer, how many messages it was not given yet (`behind`), and how many were given to it
    and are not acknowledged (`held`): a service acknowledges a message after it was scored, trained or written."""
    info = await broker.consumer_info(consumer)
    return {"consumer": consumer.name, "behind": info.num_pending or 0, "held": info.num_ack_pending or 0}


async def _decisions_in_force(broker: Broker, project: str) -> dict[str, dict[str, Any]]:
    """Return by model the decision in force, if it names a version: that one is served in place of the newest."""
    decisions = defaultdict[str, list[PolicyPromoted]](list)
    for recorded in await broker.read(PolicyPromoted, project=project):
        decisions[recorded.event.model].append(recorded.event)
    newest = {model: standing[-1] for model, made in decisions.items() if (standing := standing_decisions(made))}
    return {
        model: {name: getattr(decision, name) for name in ("action", "version", "other", "percent")}
        for model, decision in newest.items()
        if decision.version
    }


async def _raised_alarms(broker: Broker) -> list[dict[str, Any]]:
    """Return the alarms of the store service (`store.alarms`) that are raised, the newest last. Those of the supervisor
    are in its state."""
    raised: dict[tuple[str, ...], AlarmChanged] = {}
    for recorded in await broker.read(AlarmChanged):
        event = recorded.event
        key = event.project, event.alarm, event.model, event.about
        raised.pop(key, None)
        if event.state == "raised":
            raised[key] = event
    return [msgspec.to_builtins(alarm) for alarm in raised.values()]


async def _newest_groups(broker: Broker, project: str) -> dict[str, dict[str, Any]]:
    """Return by model how many training groups are among the newest messages (`newest`), and how many of these were
    discarded, whole or in part, by reason (`discarded`)."""
    last = (await broker.stream_info("GROUPS")).state.last_seq
    events: list[GroupScored | GroupDiscarded] = []
    for messages in _NEWEST:  # an evaluation's groups may be the newest
        first = max(last - messages, 0) + 1
        recorded: Sequence[LogEntry[GroupScored | GroupDiscarded]] = await broker.read_all(
            (GroupScored, GroupDiscarded), start_seq=first, project=project
        )
        events = [r.event for r in recorded if (r.event.branch, r.event.split) == ("main", "train")]
        if events or first == 1:
            break
    groups = Counter(model for model, _ in {(e.model, e.group) for e in events})
    reasons = {(e.model, e.reason, e.group) for e in events if isinstance(e, GroupDiscarded)}
    counts = Counter((model, reason) for model, reason, _ in sorted(reasons)).most_common()
    return {
        model: {
            "newest": newest,
            "discarded": {reason: count for (discarded, reason), count in counts if discarded == model},
        }
        for model, newest in groups.items()
    }


def _print(run_dir: Path, state: dict[str, Any], console: Console) -> None:
    """Print what `show` has collected: the processes and alarms, and what the log tells if it answered."""
    say = functools.partial(console.print, soft_wrap=True, markup=False)
    for text in state.get("history", ()):
        say(text)
    if not state["running"] and all(s["state"] in ("stopped", "gone") for s in state["services"].values()):
        say(
            f"run directory {run_dir}: stopped. `journeywork up` with the same settings goes on with it; "
            "`journeywork ui` and `journeywork sql` show its history"
        )
    else:
        say(f"run directory {run_dir}, gateway {state['urls']['gateway']}")
        if ui := state["urls"].get("ui"):
            say(f"dashboard {ui}")
    table = Table("service", "state", "pid", "restarts", box=None)
    for name, service in state["services"].items():
        table.add_row(name, service["state"], str(service["pid"]), str(service["restarts"]))
    console.print(table)
    for alarm in state["alarms"]:
        console.print(Text("alarm ", "bold red"), Text(alarm), sep="", soft_wrap=True)
    for alarm in state.get("raised", ()):
        model = f" of {alarm['model']}" if alarm["model"] else ""
        text = with_code(f"{alarm['alarm']}{model}: {alarm['detail']}. {alarm['action']}".strip())
        console.print(Text("alarm ", "bold red"), text, sep="", soft_wrap=True)
    if "lag" not in state:
        say(f"log: {state['log']}")
        return
    table = Table("consumer", "behind", "being handled", box=None)
    for row in state["lag"]:
        off = " (off)" if row["off"] else ""
        table.add_row(row["consumer"], f"{row['behind']:,}{off}", f"{row['held']:,}")
    console.print(table)
    for line in _training_lines(state):
        say(line)


def _training_lines(state: dict[str, Any]) -> Iterator[str]:
    """Yield what the log tells of groups and versions, in sentences."""
    waiting = state["waiting"]
    if any(waiting.values()):
        yield (
            f"groups that wait: {waiting['members']:,} for members (judge.timeout_s), {waiting['feedback']:,} for "
            "feedback (feedback.wait_s). They are not lost"
        )
    for model, groups in state.get("groups", {}).items():
        if why := ", ".join(f"{count:,} as {reason}" for reason, count in groups["discarded"].items()):
            why = why.replace("no_variance", "no_variance (equal rewards)")
            yield (
                f"groups of {model}: of the newest {groups['newest']:,} were discarded, whole or in part, {why}; "
                "docs/troubleshooting.md#nothing-trains says what to do"
            )
    for model, version in state["policies"].items():
        line = f"policy {model}: {version}"
        if decision := state.get("decided", {}).get(model):
            share = f", {decision['percent']:g} % of runs; {decision['other']} the others" if decision["other"] else ""
            line += f" is the newest, {decision['version']} is served ({decision['action']}{share})"
        yield line
