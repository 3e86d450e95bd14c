"""Chat completions of streamed chunks, with the reference to the recorded call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openai import AsyncStream, Stream
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from journeywork.art.captured import REFERENCE
from journeywork.art.refused import refusing

__getattr__ = refusing(__name__)


class StreamedCompletion:
    """The chat completion that the chunks of a stream make up."""

    def __init__(self) -> None:
        from openai.lib.streaming.chat import ChatCompletionStreamState  # 20 ms that few programs need

        self._state = ChatCompletionStreamState()
        self._references: dict[int, Any] = {}
        self._begun: set[int] = set()
        self._empty = True
        self.finished = False
        """Whether a choice has ended."""

    def add(self, chunk: ChatCompletionChunk) -> None:
        """Add the next chunk."""
        chunk = chunk.model_copy(deep=True)
        for choice in chunk.choices:
            self.finished |= choice.finish_reason is not None
            if choice.index in self._begun:
                choice.delta.role = None  # some servers repeat it, and the client's library would join it
            self._begun.add(choice.index)
            if reference := (choice.model_extra or {}).get(REFERENCE):
                self._references[choice.index] = reference
        self._empty = False
        self._state.handle_chunk(chunk)

    def completion(self) -> ChatCompletion:
        """Return the completion so far. A choice that has not ended has the finish reason `stop`. Raises `ValueError`
        before the first chunk."""
        if self._empty:
            raise ValueError("the stream held no chunk of a chat completion")
        made = self._state.current_completion_snapshot.model_dump()
        for choice in made["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            if choice["index"] in self._references:
                choice[REFERENCE] = self._references[choice["index"]]
        return ChatCompletion.model_validate(made)


async def consume_chat_completion_stream(
    stream: AsyncStream[ChatCompletionChunk],
    on_chunk: Callable[[ChatCompletionChunk, ChatCompletion], Any] | None = None,
) -> ChatCompletion:
    """Read a stream, and return the completion that it makes up.

    `on_chunk` is called with each chunk and the completion so far; a `StopIteration` of it closes the stream. Raises
    `ValueError` for a stream without a chunk."""
    streamed = StreamedCompletion()
    async for chunk in stream:
        streamed.add(chunk)
        if on_chunk is not None:
            try:
                on_chunk(chunk, streamed.completion())
            except StopIteration:
                await stream.close()
                break
    return streamed.completion()


def consume_sync_chat_completion_stream(stream: Stream[ChatCompletionChunk]) -> ChatCompletion:
    """As `consume_chat_completion_stream`, for a client that is not asynchronous."""
    streamed = StreamedCompletion()
    for chunk in stream:
        streamed.add(chunk)
    return streamed.completion()
