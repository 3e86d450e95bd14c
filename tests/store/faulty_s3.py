"""A proxy before an S3 server that fails as object storage does: errors, no answer at all, and requests that were
carried out although their answer was lost."""

from __future__ import annotations

import http.client
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

FAULTS = ("refused", "silent", "answer lost")


class FaultyS3:
    """A running proxy. `share` is the share of the requests that fail, and five times that of commits, which are few; 0
    lets all pass."""

    def __init__(self, upstream: str, seed: int, silent_s: float) -> None:
        self.share = 0.0
        self.seen: Counter[str] = Counter()
        """Faults by kind, and lost answers of commits as `commit lost`."""
        self._upstream, self._random, self._silent_s = (
            urlsplit(upstream).netloc,
            random.Random(seed),
            silent_s,
        )
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request, or not."""
        body = _body(request)
        commits = request.command == "PUT" and request.path.endswith(".json")
        with self._lock:
            share = self.share * (5 if commits else 1)
            fault = self._random.choice(FAULTS) if self._random.random() < share else ""
            if fault:
                self.seen[fault] += 1
            if fault == "answer lost" and commits:
                self.seen["commit lost"] += 1
        if fault == "refused":
            self._reply(request, 503, {}, b"<Error><Code>SlowDown</Code></Error>")
            return
        if fault == "silent":
            self._closed.wait(self._silent_s)  # longer than the client waits
            request.close_connection = True
            return
        status, headers, content = self._forward(request, body)
        if fault == "answer lost":
            request.close_connection = True
            request.connection.shutdown(socket.SHUT_RDWR)
            return
        self._reply(request, status, headers, content)

    def _forward(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self._upstream, timeout=60)
        try:
            headers = {
                k: v
                for k, v in request.headers.items()
                if k.lower() not in ("transfer-encoding", "content-length")
            }
            connection.request(
                request.command, request.path, body, headers | {"Content-Length": str(len(body))}
            )
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def _reply(
        self, request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes
    ) -> None:
        request.send_response(status)
        kept = {
            k: v
            for k, v in headers.items()
            if k.lower() not in ("connection", "transfer-encoding", "date", "server")
        }
        if request.command != "HEAD":
            kept = {k: v for k, v in kept.items() if k.lower() != "content-length"} | {
                "Content-Length": str(len(content))
            }
        for name, value in kept.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)

    def close(self) -> None:
        """Let silent requests end."""
        self._closed.set()


def _body(request: BaseHTTPRequestHandler) -> bytes:
    if request.headers.get("transfer-encoding", "").lower() != "chunked":
        return request.rfile.read(int(request.headers.get("content-length") or 0))
    parts = []
    while size := int(request.rfile.readline().split(b";")[0], 16):
        parts.append(request.rfile.read(size))
        request.rfile.readline()
    while request.rfile.readline().strip():  # trailers
        pass
    return b"".join(parts)


@contextmanager
def faulty_s3(upstream: str, seed: int, silent_s: float) -> Iterator[tuple[str, FaultyS3]]:
    """The URL of a proxy before `upstream`, and the proxy."""
    proxy = FaultyS3(upstream, seed, silent_s)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            try:
                proxy.handle(self)
            except (ConnectionError, TimeoutError):  # the client has gone
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", proxy
    finally:
        proxy.close()
        server.shutdown()
        server.server_close()
        thread.join()
