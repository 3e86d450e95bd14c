"""`journeywork status`: processes, lag, policy versions and alarms of a run, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline import streams
from pipeline.config import ConfigError, NatsConfig
from pipeline.events import AlarmChanged, CheckpointPublished, FeedbackTimedOut, GroupTimedOut
from pipeline.log.broker import Broker, BrokerError
from pipeline.printing import with_code
from pipeline.running.runs import log_of, run_settings
from pipeline.running.state import read_state
from pipeline.security.signing import Trust
from pipeline.telemetry import logs as log


def show(run_dir: Path, console: Console, *, as_json: bool = False) -> None:
    """Print the state of the run. Raises `ConfigError` where nothing was started, and `SystemExit` with 1 where a
    process is gone or the log does not answer."""
    present = read_state(run_dir)
    if present is None:
        raise ConfigError(f"{run_dir} holds no state.json: nothing was started there")
    state = msgspec.to_builtins(present) | {"running": present.running}
    log.configure("status", "CRITICAL")  # errors are printed as one line
    if state["services"].get("nats", {}).get("state") == "stopped":
        state["log"] = "it was stopped with the run"  # another run's log may have its port now
    else:
        try:
            config = run_settings(run_dir, sections=("nats", "signing"))
            state |= anyio.run(read_log, log_of(config), Trust(config.signing))
        except BrokerError as error:
            state["log"] = str(error)
    running = {n for n, s in state["services"].items() if s["state"] not in ("stopped", "gone")}
    if "lag" in state:
        # A consumer's name begins with the service that takes from it. One that is off isn't behind.
        rows = [(row["consumer"].partition("-")[0], row) for row in state["lag"]]
        state["lag"] = [row | {"off": name not in running} for name, row in rows if name in state["services"]]
    if as_json:
        console.print_json(msgspec.json.encode(state).decode())
    else:
        _print(run_dir, state, console)
    if "lag" not in state or any(s["state"] == "gone" for s in state["services"].values()):
        raise SystemExit(1)


async def read_log(nats: NatsConfig, trust: Trust) -> dict[str, Any]:
    """Return what the log tells: lag, policy versions, alarms. Raises `BrokerError`."""
    nats = msgspec.structs.replace(nats, publish_deadline_s=min(nats.publish_deadline_s, 10.0))
    async with Broker.connect(nats, name="status", provision=False) as broker:
        lag = [
            {"consumer": c.name, "behind": await broker.lag(c.name, exact=True)} for c in streams.CONSUMERS
        ]
        policies = {}
        for recorded in await broker.read(CheckpointPublished):
            if not trust.objection(recorded.event):
                policies[recorded.event.model] = recorded.event.version
        raised: dict[tuple[str, str, str], AlarmChanged] = {}
        for change in await broker.read(AlarmChanged):
            event = change.event
            key = event.alarm, event.model, event.about
            raised.pop(key, None)
            if event.state == "raised":
                raised[key] = event
        waiting = {
            what: len(await broker.subjects("TIMERS", f"{streams.TIMER_SET}.{timer.subject_prefix()}.>"))
            for what, timer in (("members", GroupTimedOut), ("feedback", FeedbackTimedOut))
        }
        return {
            "lag": lag,
            "policies": policies,
            # Groups that the judge keeps open, by what they wait for.
            "waiting": waiting,
            # The store service's (docs/alarms.md). The supervisor's are in its state.
            "raised": [
                {
                    name: getattr(a, name)
                    for name in ("alarm", "model", "about", "value", "detail", "action", "since")
                }
                for a in raised.values()
            ],
        }


def _print(run_dir: Path, state: dict[str, Any], console: Console) -> None:
    if not state["running"] and all(s["state"] in ("stopped", "gone") for s in state["services"].values()):
        console.print(
            f"run directory {run_dir}: stopped. `journeywork up` with the same settings goes on with it; "
            "`journeywork ui` and `journeywork sql` show its history",
            soft_wrap=True,
        )
    else:
        console.print(f"run directory {run_dir}, gateway {state['urls']['gateway']}", soft_wrap=True)
        if ui := state["urls"].get("ui"):
            console.print(f"dashboard {ui}")
    table = Table("service", "state", "pid", "restarts", box=None)
    for name, service in state["services"].items():
        table.add_row(name, service["state"], str(service["pid"]), str(service["restarts"]))
    console.print(table)
    for alarm in state["alarms"]:
        console.print(f"[bold red]alarm[/] {alarm}", soft_wrap=True)
    for alarm in state.get("raised", ()):
        model = f" of {alarm['model']}" if alarm["model"] else ""
        text = with_code(f"{alarm['alarm']}{model}: {alarm['detail']}. {alarm['action']}".strip())
        console.print(Text("alarm ", "bold red"), text, sep="", soft_wrap=True)
    if "lag" not in state:
        console.print(f"log: {state['log']}", soft_wrap=True)
        return
    table = Table("consumer", "behind", box=None)
    for row in state["lag"]:
        off = " (off)" if row["off"] else ""
        table.add_row(row["consumer"], f"{row['behind']:,}{off}")
    console.print(table)
    waiting = state["waiting"]
    if any(waiting.values()):
        console.print(
            f"groups that wait: {waiting['members']:,} for members (judge.timeout_s), {waiting['feedback']:,} for "
            "feedback (feedback.wait_s)",
            soft_wrap=True,
        )
    for model, version in state["policies"].items():
        console.print(f"policy {model}: {version}")
