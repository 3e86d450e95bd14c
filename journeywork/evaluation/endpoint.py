"""The endpoint of a model that the gateway does not serve.

An agent under evaluation calls a server on the loopback as it would call the gateway. The server passes each call to an
OpenAI-compatible server with the entrant's model, and counts calls, tokens, seconds
and cost for each run. Only requests with the key of an open run are answered, so that no other user of the machine can
spend the provider's key.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import Unpack

from journeywork.evaluation.entrants import Entrant
from journeywork.evaluation.upstreams import Reply, Upstream, UpstreamError
from journeywork.trajectory import OpenOptions, Trajectory, Usage


@dataclass
class _Meter:
    """What the calls of one run took so far. Calls of one run may be concurrent."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    usage: Usage = field(default_factory=Usage)

    def add(self, reply: Reply, seconds: float) -> None:
        with self.lock:
            before = self.usage
            self.usage = Usage(
                before.calls + 1,
                before.prompt_tokens + reply.prompt_tokens,
                before.completion_tokens + reply.completion_tokens,
                before.calls_s + seconds,
            )


class ExternalClient:
    """Takes the place of `AsyncJourneywork` in `gather`: opens runs of an external entrant, and records nothing."""

    def __init__(self, entrant: Entrant) -> None:
        self._entrant = entrant
        self._meters: dict[str, _Meter] = {}
        """Of the open runs, by API key."""
        self._upstream = Upstream(entrant)
        self.base_url = ""

    @asynccontextmanager
    async def trajectory(self, model: str, **options: Unpack[OpenOptions]) -> AsyncIterator[Trajectory]:
        """Yield a run whose calls reach the entrant's model. `model` is not used."""
        key = secrets.token_urlsafe(24)
        meter = self._meters[key] = _Meter()
        name = f"x-{secrets.token_hex(10)}"
        run = Trajectory(name, self._entrant.model, options.get("group") or name, self.base_url, key)
        try:
            yield run
            run.result()  # raises for a reward that is no number
        except BaseException:
            run.outcome = "no_result"
            raise
        finally:
            del self._meters[key]
            run.usage = meter.usage

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve while the block runs."""
        client = self

        class Handler(_Handler):
            meters, upstream = client._meters, client._upstream

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        self.base_url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
            self._upstream.close()


class _Handler(BaseHTTPRequestHandler):
    """One connection of an agent."""

    protocol_version = "HTTP/1.1"
    meters: Mapping[str, _Meter]
    upstream: Upstream

    def do_POST(self) -> None:
        # The body is read first: a connection that keeps an unread body can't take the next request.
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        meter = self.meters.get((self.headers.get("authorization") or "").removeprefix("Bearer "))
        if meter is None:
            self._refuse(401, "This key is not that of an open run.")
            return
        began = time.monotonic()
        try:
            asked = json.loads(body)
            if not isinstance(asked, dict):
                raise TypeError("it is no object")
        except (ValueError, TypeError) as error:
            self._refuse(400, f"The body is not valid: {error}.")
            return
        try:
            reply = self.upstream.ask(self.path, asked)
        except UpstreamError as error:
            self._refuse(error.status, str(error))
            return
        meter.add(reply, time.monotonic() - began)
        self._answer(200, reply.content_type, reply.body)

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps({"error": {"message": message, "type": "invalid_request_error"}})
        self._answer(status, "application/json", body.encode())

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        """Nothing: standard error shows the progress bar."""
