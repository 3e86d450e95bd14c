"""The dashboard as a service: it answers on `ui.host` and `ui.port` until it is cancelled."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import anyio
import uvicorn

from pipeline.config import Config
from pipeline.running.ports import host_and_port, http_url
from pipeline.running.service import Ready
from store.showing.dashboard.access import Access
from store.showing.dashboard.server import Dashboard

_STOP_S = 2
"""Time that running requests get when the service stops."""


class ListenError(Exception):
    """The dashboard cannot listen on its address. The message says why, and what to do."""


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle no signal: `pipeline.running.service` does."""
        yield


def check(config: Config) -> None:
    """Raise `ConfigError` if the dashboard would not start with these settings."""
    Access(config)


async def serve(config: Config, ready: Ready) -> None:
    """Answer until cancelled; `ready` is called with the URL. Raises `ConfigError`, `StoreError`, and `ListenError`
    where the address is taken."""
    check(config)
    host = config.ui.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        opened = socket.create_server((host, config.ui.port), family=family)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]  # Python adds the address
        raise ListenError(
            f"the dashboard cannot listen on {host_and_port(host, config.ui.port)}: {why}. Another dashboard may run "
            "there already; choose another port (ui.port, --port; 0: any free one) or another address (ui.host)"
        ) from error
    with opened as listener:
        app = Dashboard(config).app
        server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                lifespan="on",
                timeout_graceful_shutdown=_STOP_S,
            )
        )
        async with anyio.create_task_group() as tg:

            async def answer() -> None:
                with anyio.CancelScope(shield=True):  # uvicorn stops by itself when it is told to
                    await server.serve([listener])
                tg.cancel_scope.cancel()

            tg.start_soon(answer)
            ready(url=http_url(host, listener.getsockname()[1]))
            try:
                await anyio.sleep_forever()
            finally:
                server.should_exit = True
