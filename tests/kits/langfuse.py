"""A receiver of OTLP/HTTP with Langfuse's API for scores.

It takes what Langfuse's published OpenAPI file says (`langfuse_api.json`), and answers 400 to anything else:
a field, a parameter or a value that the file does not have fails the test that sends it.
"""

import base64
import gzip
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import jsonschema
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

API: dict[str, Any] = json.loads((Path(__file__).with_name("langfuse_api.json")).read_text())
PUBLIC, SECRET = "pk-lf-1", "sk-lf-1"


@dataclass
class Span:
    """A span as the receiver got it; ids in hexadecimal, times in nanoseconds."""

    trace: str
    id: str
    parent: str
    name: str
    kind: int
    start: int
    end: int
    failed: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    links: list[tuple[str, str]]
    resource: dict[str, Any]


@dataclass
class LangfuseReceiver:
    """What came, and what the API gives."""

    url: str = ""
    spans: dict[tuple[str, str], Span] = field(default_factory=dict)
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    posts: int = 0
    """Scores that were posted, repetitions included."""
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Path and headers, in lower case, of every request that was accepted."""
    rejected: list[str] = field(default_factory=list)
    """Requests that the OpenAPI file does not allow."""
    refuse: int = 0
    """Number of requests to answer with `refuse_status`."""
    refuse_status: int = 503
    most_bytes: int = 0
    """Requests with a longer body are answered with 413; 0: none."""

    def trace(self, name: str) -> dict[str, list[Span]]:
        """The spans of a trace, by name."""
        found: dict[str, list[Span]] = {}
        for span in sorted(self.spans.values(), key=lambda s: (s.start, s.id)):
            if span.trace == name:
                found.setdefault(span.name, []).append(span)
        return found

    def take_spans(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = _attributes(resource.resource)
            for s in (span for scope in resource.scope_spans for span in scope.spans):
                ids = s.trace_id.hex(), s.span_id.hex(), s.parent_span_id.hex()
                times = s.start_time_unix_nano, s.end_time_unix_nano
                events = [(event.name, _attributes(event)) for event in s.events]
                to = [(link.trace_id.hex(), link.span_id.hex()) for link in s.links]
                span = Span(*ids, s.name, s.kind, *times, s.status.message, _attributes(s), events, to, about)
                self.spans[span.trace, span.id] = span

    def answer(self, target: str, body: bytes) -> tuple[int, Any]:
        """Status and body of a POST request of the API."""
        if target == "/api/public/otel/v1/traces":
            self.take_spans(body)
            return 200, None
        if f"POST {target}" not in API:
            return 404, {"message": f"no POST {target}"}
        refused = [score["name"] for score in json.loads(body) if "NaN" in score["name"]]
        for score in json.loads(body):
            if score["name"] not in refused:
                self._take_score(score)
        if refused:
            return 207, {"accepted": self.posts, "rejected": len(refused), "errors": [f"no such name: {refused}"]}
        return 202, {"message": "Accepted"}

    def _take_score(self, body: dict[str, Any]) -> None:
        jsonschema.validate(body, API["POST /api/public/scores"]["body"])
        self.posts += 1
        self.scores[body["id"]] = body


def _attributes(holder: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in holder.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def run_langfuse() -> Iterator[LangfuseReceiver]:
    """Start a receiver on a free port."""
    receiver = LangfuseReceiver()
    allowed = "Basic " + base64.b64encode(f"{PUBLIC}:{SECRET}".encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            if len(body) < length:
                return None  # the client was stopped in the middle of its request
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if receiver.refuse:
                receiver.refuse -= 1
                return self._say(receiver.refuse_status, {"message": "later"})
            if 0 < receiver.most_bytes < len(body):
                return self._say(413, {"message": "too large"})
            if self.headers.get("Authorization") != allowed:
                return self._say(401, {"message": "wrong key"})
            try:
                status, answer = receiver.answer(self.path, body)
            except jsonschema.ValidationError as error:
                receiver.rejected.append(f"POST {self.path}: {error}")
                return self._say(400, {"message": str(error)})
            receiver.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
            return self._say(status, answer)

        def _say(self, status: int, answer: Any) -> None:
            body = b"" if answer is None else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exc_info()[1], ConnectionError):
                super().handle_error(request, client_address)

    server = Server(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
