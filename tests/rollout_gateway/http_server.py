"""An HTTP server with one handler of all requests: in the test's event loop, or in a thread of its own."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web
from anyio.from_thread import start_blocking_portal

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler, port: int = 0) -> AsyncIterator[int]:
    """Serve while the block runs. Yields the port. At the end all requests under way are cancelled."""
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", handler)
    # The handler of a client that leaves is cancelled. With a timeout of 0, aiohttp would wait for handlers for ever.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


@contextmanager
def served(handler: Handler) -> Iterator[str]:
    """Serve in a thread while the block runs. Yields the URL."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(serving(handler)) as port:
        yield f"http://127.0.0.1:{port}"
