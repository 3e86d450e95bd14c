"""`<run_dir>/state.json`: the processes of an installation and their addresses. The supervisor writes it, commands and
pages read it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipeline.files import read_json, write_whole

STATE = "state.json"


class ProcessState(msgspec.Struct, kw_only=True):
    """A process of an installation, as the supervisor last knew it."""

    pid: int = 0
    since: str = ""
    """When it began (`process_start`), by which another process with the same id is told from it. Empty: it did not
    run when the file was written."""
    state: str = ""
    """One of the states of `pipeline.running.supervisor.Watched`. `read_state` adds `gone`: the process died with the
    supervisor, which could not write that."""
    restarts: int = 0


class RunState(msgspec.Struct, kw_only=True):
    """The processes of a run directory."""

    pid: int = 0
    """The supervisor's."""
    since: str = ""
    """When the supervisor began, as a process's `since`."""
    ready: bool = False
    """Whether all processes are ready."""
    project: str = ""
    urls: dict[str, str | tuple[str, ...]] = {}
    alarms: tuple[str, ...] = ()
    """Present alarms about the log."""
    services: dict[str, ProcessState] = {}

    @property
    def running(self) -> bool:
        """Whether the supervisor is running."""
        return _is_alive(self)

    def url(self, service: str) -> str:
        """Return the address of a service, the first one if it has several. It is empty if the service was stopped: its
        port may belong to another run by now."""
        process = self.services.get(service)
        if process is not None and process.state == "stopped":
            return ""
        urls = self.urls.get(service) or ""
        return urls if isinstance(urls, str) else urls[0]

    def running_pid(self, service: str) -> int:
        """Return the id of the process in which a service runs; 0 if it does not."""
        process = self.services.get(service)
        return process.pid if process is not None and process.state not in ("stopped", "gone") else 0


def read_state(run_dir: Path) -> RunState | None:
    """Return the state of a run directory as it is now; `None` if nothing was started there. Raises `ConfigError` if
    its file is damaged."""
    try:
        state = read_json(run_dir / STATE, RunState, "delete it; `journeywork up` writes it again")
    except FileNotFoundError:
        return None
    for process in state.services.values():
        if process.state != "stopped" and not _is_alive(process):
            process.state = "gone"
    return state


def write_state(run_dir: Path, state: RunState) -> None:
    """Replace the state. Raises `OSError`."""
    write_whole(run_dir / STATE, msgspec.json.format(msgspec.json.encode(state)))


def process_start(pid: int) -> str:
    """Return the id of this machine's boot and the clock tick since then at which process `pid` began; empty if no such
    process runs. Together they identify the process: no other one has both."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
    except OSError:
        return ""
    state, start_tick = fields[0], fields[19]  # proc(5): fields 3 and 22; those before stand in front of the ")"
    return "" if state == "Z" else f"{boot} {start_tick}"


def _is_alive(process: ProcessState | RunState) -> bool:
    """Return whether the process itself, not another one with its id, runs on this machine."""
    return bool(process.since) and process_start(process.pid) == process.since
