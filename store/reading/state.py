"""What runs of a run on this machine, from the supervisor's `state.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from pipeline.config import Config
from pipeline.running.runs import STATE, is_alive


@dataclass(frozen=True)
class State:
    """The processes of a run directory."""

    running: bool | None = None
    """Whether the supervisor is running; `None` where none was ever started here."""
    urls: dict[str, str] = field(default_factory=dict)
    services: dict[str, str] = field(default_factory=dict)
    """State of each process."""
    alarms: tuple[str, ...] = ()
    """The supervisor's own alarms."""

    @property
    def word(self) -> Literal["running", "stopped", "unknown"]:
        """The state in one word."""
        return "unknown" if self.running is None else "running" if self.running else "stopped"


def read_state(config: Config) -> dict[str, Any]:
    """Return what `state.json` holds; empty where nothing was started."""
    path = config.path(STATE)
    return dict(msgspec.json.decode(path.read_bytes())) if path.is_file() else {}


def state_of(config: Config) -> State:
    """Return the state of a run's processes."""
    state = read_state(config)
    if not state:
        return State()
    alive = is_alive(state.get("pid", 0))
    services = {
        name: one["state"] if one["state"] == "stopped" or is_alive(one["pid"]) else "gone"
        for name, one in state.get("services", {}).items()
    }
    urls = {name: url for name, url in state.get("urls", {}).items() if isinstance(url, str)}
    return State(alive, urls, services, tuple(state.get("alarms", ())) if alive else ())
