"""Which versions the inference servers have loaded, by the events of their sampler agents.

A *sampler agent* is the process beside an inference server that loads new versions into it and publishes
`policy.loaded` and `policy.unloaded`. A server that starts anew has nothing loaded, whatever was published before."""

from __future__ import annotations

from pipeline.events import PolicyLoaded, PolicyUnloaded


class LoadedVersions:
    """What each server has loaded; of a server that was restarted, what its newest process has."""

    def __init__(self) -> None:
        self._by_server: dict[str, tuple[str, dict[str, str]]] = {}
        """For each server, the start of its process, and the SHA-256 of the loaded adapters by version."""

    def apply(self, event: PolicyLoaded | PolicyUnloaded) -> None:
        """Update what is loaded by an event. Call it with all events in the order of the log."""
        process, loaded = self._by_server.get(event.replica, ("", {}))
        if isinstance(event, PolicyLoaded):
            if process != event.server_start:
                loaded = {}  # a restarted server has nothing loaded
            self._by_server[event.replica] = (event.server_start, {**loaded, event.version: event.adapter_sha256})
        elif process == event.server_start:
            loaded.pop(event.version, None)

    def at(self, server: str, server_start: str) -> dict[str, str]:
        """Return the SHA-256 by version of what one process of a server has loaded."""
        process, loaded = self._by_server.get(server, ("", {}))
        return loaded if process == server_start else {}

    def anywhere(self) -> set[tuple[str, str]]:
        """Return version and SHA-256 of the adapters that at least one server has loaded."""
        return {adapter for _, loaded in self._by_server.values() for adapter in loaded.items()}
