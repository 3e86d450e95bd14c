"""Outputs of a streamed answer: to the client unchanged, or translated into another API's events."""

from __future__ import annotations

from collections.abc import Callable

from rollout_gateway.api.models import SSE_HEADERS
from rollout_gateway.dialects.translate import TranslatedStream, Translation
from rollout_gateway.http.request import HeaderList, Request


class RequestSink:
    """Writes a stream to the client of `request`. `headers`: further ones of the answer."""

    def __init__(self, request: Request, headers: HeaderList = ()) -> None:
        self.request, self._headers = request, headers

    def start(self, flow: Callable[[bool], None]) -> None:
        self.request.start(200, (*SSE_HEADERS, *self._headers))
        self.request.on_flow = flow

    @property
    def write_chunks(self) -> Callable[[bytes], None] | None:
        return self.request.write_chunks if self.request.chunked else None

    def write(self, data: bytes) -> None:
        self.request.write(data)

    def end(self) -> None:
        self.request.end()


class TranslatingSink(RequestSink):
    """Writes the stream of a chat completion as the stream of another API."""

    def __init__(self, request: Request, translation: Translation, headers: HeaderList) -> None:
        super().__init__(request, headers)
        self._stream = TranslatedStream(translation)

    @property
    def write_chunks(self) -> None:
        return None  # the other API has other events

    def write(self, data: bytes) -> None:
        self.request.write(self._stream.take(data))

    def end(self) -> None:
        self.request.write(self._stream.end())
        self.request.end()
