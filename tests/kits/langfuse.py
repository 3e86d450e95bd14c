"""A receiver of OTLP/HTTP with Langfuse's API for scores and traces.

It takes and gives what Langfuse's published OpenAPI file says (`langfuse_api.json`), and answers 400 to anything else:
a field, a parameter or a value that the file does not have fails the test that sends it.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

API: dict[str, Any] = json.loads((Path(__file__).with_name("langfuse_api.json")).read_text())
PUBLIC, SECRET = "pk-lf-1", "sk-lf-1"
AT = "2026-11-20T10:30:00.000Z"
_TYPES = {"string": str, "number": (int, float), "object": dict}


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
    """Number of requests to answer with 503."""
    most_bytes: int = 0
    """Requests with a longer body are answered with 413; 0: none."""
    lists: bool = False
    """Whether scores come in lists, as in the newest version of the file."""
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    human: list[dict[str, Any]] = field(default_factory=list)
    """Scores of people, with every field of version 3."""

    def annotate(self, trace: str, value: Any, name: str = "quality", **more: Any) -> dict[str, Any]:
        """A person scores a trace."""
        data_type = more.pop("dataType", "BOOLEAN" if isinstance(value, bool) else "NUMERIC")
        score = {
            "id": f"human-{len(self.human)}", "projectId": "p", "name": name, "value": value, "dataType": data_type,
            "source": "ANNOTATION", "timestamp": AT, "environment": "default", "createdAt": AT, "updatedAt": AT,
            "comment": None, "configId": None, "metadata": {}, "authorUserId": "annotator-1", "queueId": "queue-1",
            "subject": {"kind": "trace", "id": trace},
        } | more  # fmt: skip
        self.human.append(score)
        return score

    def trace(self, name: str) -> dict[str, list[Span]]:
        """The spans of a trace, by name."""
        found: dict[str, list[Span]] = {}
        for span in sorted(self.spans.values(), key=lambda s: (s.start, s.id)):
            if span.trace == name:
                found.setdefault(span.name, []).append(span)
        return found

    def take_spans(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {a.key: _value(a.value) for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                for s in scope.spans:
                    span = Span(
                        s.trace_id.hex(), s.span_id.hex(), s.parent_span_id.hex(), s.name, s.kind,
                        s.start_time_unix_nano, s.end_time_unix_nano, s.status.message,
                        {a.key: _value(a.value) for a in s.attributes},
                        [(e.name, {a.key: _value(a.value) for a in e.attributes}) for e in s.events],
                        [(k.trace_id.hex(), k.span_id.hex()) for k in s.links], about,
                    )  # fmt: skip
                    self.spans[span.trace, span.id] = span

    def answer(self, method: str, target: str, body: bytes) -> tuple[int, Any]:
        """Status and body of a request of the API."""
        split = urlsplit(target)
        path, query = split.path, dict(parse_qsl(split.query))
        if (method, path) == ("POST", "/api/public/otel/v1/traces"):
            self.take_spans(body)
            return 200, None
        operation = next((op for op in API if op != "source" and _matches(op, f"{method} {path}")), "")
        if not operation:
            return 404, {"message": f"no {method} {path}"}
        if wrong := [name for name in query if name not in API[operation].get("query", [])]:
            raise ValueError(f"{operation} has no parameter {wrong}")
        if int(query.get("limit", "1")) > API[operation].get("limit", 100):
            raise ValueError(f"{operation}: limit {query['limit']}")
        match path.removeprefix("/api/public/").split("/"):
            case ["scores"]:
                found = json.loads(body)
                if isinstance(found, list) is not self.lists:
                    return 400, {"message": "a list is wanted" if self.lists else "an object is wanted"}
                if not self.lists:
                    return 200, self._take_score(found)
                for score in found:
                    if "NaN" in score["name"]:
                        return 207, {"accepted": 0, "rejected": 1, "errors": [{"message": "no such name"}]}
                    self._take_score(score)
                return 202, {"message": "Accepted"}
            case ["v3", "scores"]:
                return 200, self._scores(query)
            case ["v2", "observations"]:
                return 200, self._observations(query)
            case ["score-configs", name]:
                return (200, self.configs[name]) if name in self.configs else (404, {})
        raise ValueError(f"the kit does not do {operation}")

    def _take_score(self, body: dict[str, Any]) -> dict[str, str]:
        schema = API["POST /api/public/scores"]["body"]
        for name in schema["required"]:
            if name not in body:
                raise ValueError(f"a score without {name}")
        for name, value in body.items():
            _check(name, value, schema["properties"].get(name))
        self.posts += 1
        self.scores[body["id"]] = body
        return {"id": body["id"]}

    def _scores(self, query: dict[str, str]) -> dict[str, Any]:
        groups = API["GET /api/public/v3/scores"]["fields"]
        fields = [*groups["core"]]
        for group in query.get("fields", "").split(","):
            fields += groups[group] if group else []
        wanted = [s for s in self.human if s["source"] == query.get("source", s["source"])]
        begin, limit = int(query.get("cursor", "0")), min(int(query.get("limit", "50")), 2)
        meta: dict[str, Any] = {"limit": limit}
        if begin + limit < len(wanted):
            meta["cursor"] = str(begin + limit)
        return {"data": [{f: s[f] for f in fields} for s in wanted[begin : begin + limit]], "meta": meta}

    def _observations(self, query: dict[str, str]) -> dict[str, Any]:
        api = API["GET /api/public/v2/observations"]
        if query.get("type", "SPAN") not in api["types"] or set(query["fields"].split(",")) - set(
            api["fields"]
        ):
            raise ValueError(f"observations: {query}")
        spans = [s for s in self.spans.values() if s.trace == query["traceId"]]
        data = [
            {
                "id": s.id, "traceId": s.trace, "type": query["type"], "name": s.name, "projectId": "p",
                "startTime": AT, "endTime": AT, "parentObservationId": s.parent or None, "metadata": _metadata([s]),
            }
            for s in spans
            if s.attributes["langfuse.observation.type"].upper() == query["type"]
        ]  # fmt: skip
        return {"data": data, "meta": {}}


def _metadata(spans: list[Span]) -> dict[str, Any]:
    return {
        key.split(".metadata.", 1)[1]: value
        for span in spans
        for key, value in span.attributes.items()
        if key.startswith(("langfuse.trace.metadata.", "langfuse.observation.metadata."))
    }


def _matches(operation: str, asked: str) -> bool:
    return re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", operation), asked) is not None


def _check(name: str, value: Any, schema: dict[str, Any] | None) -> None:
    if schema is None:
        raise ValueError(f"a score has no field {name}")
    if "enum" in schema and value not in schema["enum"]:
        raise ValueError(f"{name} is {value!r}, not one of {schema['enum']}")
    if types := schema.get("type"):
        allowed = [types] if isinstance(types, str) else types
        if not any(isinstance(value, _TYPES[t]) for t in allowed):
            raise ValueError(f"{name} is {value!r}, not {types}")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        raise ValueError(f"{name} is {value!r}, which does not match {schema['pattern']}")


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(v) for v in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def run_langfuse(port: int = 0) -> Iterator[LangfuseReceiver]:
    """Start a receiver. Port 0: a free one."""
    receiver = LangfuseReceiver()
    allowed = "Basic " + base64.b64encode(f"{PUBLIC}:{SECRET}".encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self._handle("POST")

        def do_GET(self) -> None:
            self._handle("GET")

        def _handle(self, method: str) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            if len(body) < length:
                return None  # the client was stopped in the middle of its request
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if receiver.refuse:
                receiver.refuse -= 1
                return self._say(503, {"message": "later"})
            if 0 < receiver.most_bytes < len(body):
                return self._say(413, {"message": "too large"})
            if self.headers.get("Authorization") != allowed:
                return self._say(401, {"message": "wrong key"})
            try:
                status, answer = receiver.answer(method, self.path, body)
            except (ValueError, KeyError) as error:
                receiver.rejected.append(f"{method} {self.path}: {error}")
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

    server = Server(("127.0.0.1", port), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
