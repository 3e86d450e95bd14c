"""What runs of a run on this machine, from the supervisor's `state.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.config import Config
from pipeline.running.state import read_state


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


def state_of(config: Config) -> State:
    """Return the state of a run's processes."""
    state = read_state(Path(config.run_dir))
    if state is None:
        return State()
    services = {name: process.state for name, process in state.services.items()}
    urls = {name: url for name, url in state.urls.items() if isinstance(url, str)}
    return State(state.running, urls, services, state.alarms if state.running else ())
