"""The ports of an installation: free ones, and the check that those of the settings are free."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext, suppress

from pipeline.config import Config, ConfigError

LOOPBACK = "127.0.0.1"
_RANGE = range(31_000, 32_768)
"""Below those that Linux gives to connections and to other servers: one of those could be taken before, or while, a
process starts that is to listen there."""


def host_and_port(host: str, port: int) -> str:
    """Return an address as URLs and messages write it: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def http_url(host: str, port: int) -> str:
    """Return the URL of an HTTP server on an address, without a path."""
    return f"http://{host_and_port(host, port)}"


_random = random.SystemRandom()  # not the one that a program may seed
_returned: set[int] = set()
"""Ports that `free_port` has returned in this process; their servers may not listen yet."""


def free_port(host: str = LOOPBACK, preferred: int = 0) -> int:
    """Return a port that no process listens on now, `preferred` if it is free, and that no call in this process has
    returned. The caller keeps using the same port when a process restarts."""
    # 0 lets the system choose; an error then is one of the host's name, and no other port would do.
    for port in (*([preferred] if preferred else []), *_random.sample(_RANGE, 100), 0):
        with suppress(OSError) if port else nullcontext(), _listener(host, port) as probe:
            if (free := int(probe.getsockname()[1])) not in _returned:
                _returned.add(free)
                return free
    return free_port(host)  # the system chose one that was returned before


def check_ports(config: Config, processes: Iterable[str]) -> None:
    """Raise `ConfigError`, which names setting and port, if one of `processes` can't listen on its port: the process
    itself would fail only after others have started."""
    addresses = {
        "nats": (LOOPBACK, config.nats.port),
        "vllm": (LOOPBACK, config.vllm.port),
        "gateway": (config.gateway.host, config.gateway.port),
        "ui": (config.ui.host, config.ui.port),
    }
    with ExitStack() as listeners:  # all are kept open to the end, to find two processes with the same port
        for name in (process for process in processes if process in addresses):
            host, port = addresses[name]
            try:
                listeners.enter_context(_listener(host, port))
            except OSError as error:
                raise ConfigError(
                    f"{name}.port: {name} can't listen on port {port} of {host}: {error.strerror}. End the program "
                    "that has the port, or choose another one; 0: any free one"
                ) from error


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address. Raises `OSError` if that can't be."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
