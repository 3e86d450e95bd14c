"""Tool calls of a stream told apart, each by a position and an id of its own."""

from __future__ import annotations

import hashlib

import msgspec


class FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class ToolDelta(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: FunctionDelta | None = None


class CallIds:
    """The ids of a choice's tool calls, by their positions: a server may give two calls one index, or a call no id."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._given: dict[tuple[int, str], int] = {}
        """Positions of the calls to which the server gave an id, by index and id."""
        self._newest: dict[int, int] = {}
        """Position of the newest call with an index."""
        self._made: set[int] = set()
        """Positions of the calls whose ids are the gateway's."""

    def mend(self, delta: ToolDelta, number: int, reply: msgspec.Raw | None) -> bool:
        """Replace the index of a delta, the one with this number in its chunk, by its call's position, and its id by
        the call's id where the call begins. Returns whether that changed the delta."""
        before = delta.index, delta.id
        index = number if delta.index is None else delta.index
        position = self._newest.get(index)
        if delta.id and position not in self._made:
            position = self._given.get((index, delta.id))
        if position is None:
            position = len(self._ids)
            self._ids.append(delta.id or new_call_id(reply, position))
            if delta.id:
                self._given[index, delta.id] = position
            else:
                self._made.add(position)
            delta.id = self._ids[position]
        elif delta.id != self._ids[position]:
            delta.id = None  # the call has the gateway's id
        self._newest[index], delta.index = position, position
        return before != (delta.index, delta.id)


def new_call_id(reply: msgspec.Raw | None, position: int) -> str:
    """Return the id of a tool call to which the server gave none. Some models' templates take nine characters only."""
    return hashlib.sha256(b"%b %d" % (bytes(reply or b""), position)).hexdigest()[:9]
