"""The trace backend: where spans are sent by OTLP over HTTP, in requests of a bounded size.

The destination comes from the standard `OTEL_*` variables, or from LANGFUSE_PUBLIC_KEY, LANGFUSE_SECRET_KEY and
LANGFUSE_BASE_URL, which have precedence.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import anyio
import anyio.to_thread
import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from pipeline.config import ConfigError
from pipeline.telemetry.logs import get_logger
from pipeline.tracing.langfuse import destination

logger = get_logger("pipeline.tracing.backend")

REQUEST_CHARS = 2_000_000
"""Characters of text in one request: backends limit its size."""
RETRY_S = 5.0
_REFUSED = frozenset({400, 413})
"""Statuses after which the same request can never succeed. OTLP says so of other statuses too, but a wrong key or
address (401, 403, 404) is corrected by a person, and the spans are then wanted."""


class TraceBackend:
    """Sends spans with OpenTelemetry's exporter, which tells success or failure, and remembers the HTTP status."""

    def __init__(self, **options: Any) -> None:
        """`options` are those of OpenTelemetry's exporter; without any it reads the `OTEL_*` variables."""
        self._thread = threading.local()
        session = requests.Session()
        session.hooks["response"].append(self._remember_status)
        # The exporter would drop what is over a size of its own; the backend's limit is what counts.
        self._exporter = OTLPSpanExporter(session=session, max_request_size=0, **options)

    @classmethod
    def from_environment(cls) -> TraceBackend:
        """Return the backend that the environment names. Raises `ConfigError` if it names none."""
        if project := destination():
            return cls(
                endpoint=f"{project.url}/api/public/otel/v1/traces",
                headers={"Authorization": project.authorization, "x-langfuse-ingestion-version": "4"},
            )
        for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            if (protocol := os.environ.get(name, "http/protobuf")) != "http/protobuf":
                raise ConfigError(f"{name} is {protocol!r}: spans are sent as http/protobuf only")
        if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
            return cls()
        raise ConfigError("telemetry is on, but neither OTEL_EXPORTER_OTLP_ENDPOINT nor LANGFUSE_SECRET_KEY is set")

    def export(self, spans: list[ReadableSpan]) -> int:
        """Send one request. Blocks. Returns its HTTP status; 0 if no answer came."""
        self._thread.status = 0
        succeeded = self._exporter.export(spans) is SpanExportResult.SUCCESS
        return 200 if succeeded else self._thread.status

    def close(self) -> None:
        """Close OpenTelemetry's exporter, which sends nothing more."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _remember_status(self, response: requests.Response, *_: Any, **__: Any) -> None:
        """Keep the status of an answer for `export`, which runs in the same thread: the exporter does not tell it."""
        self._thread.status = response.status_code


def split_into_requests(spans: Iterable[ReadableSpan]) -> Iterator[list[ReadableSpan]]:
    """Yield the spans in lists, one for each request: of at most `REQUEST_CHARS` of text, or of a single span that has
    more."""
    request: list[ReadableSpan] = []
    size = 0
    for span in spans:
        chars = sum(len(value) for value in (span.attributes or {}).values() if isinstance(value, str))
        if request and size + chars > REQUEST_CHARS:
            yield request
            request, size = [], 0
        request.append(span)
        size += chars
    if request:
        yield request


async def send(backend: TraceBackend, spans: list[ReadableSpan]) -> None:
    """Send spans until the backend has them.

    While it can't be reached, or refuses for a reason that may pass, the request is repeated every `RETRY_S` seconds.
    A request that it refuses for good is halved. A single span that it refuses is left out with an error in the log, so
    it stops no others."""
    pending = [spans]
    while pending:
        request = pending.pop()
        status = await anyio.to_thread.run_sync(backend.export, request)
        if status == 200:
            continue
        if status not in _REFUSED:
            logger.warning(
                "the trace backend took no spans; retrying", spans=len(request), status=status, after_s=RETRY_S
            )
            await anyio.sleep(RETRY_S)
            pending.append(request)
        elif len(request) > 1:
            middle = len(request) // 2
            pending += [request[middle:], request[:middle]]
        else:
            context = request[0].context
            logger.error(
                "the trace backend refused a span; it is left out",
                span=request[0].name,
                trace=f"{context.trace_id:032x}" if context else "",
                status=status,
            )
