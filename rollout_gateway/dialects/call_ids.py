"""Tool calls of a stream told apart, each by a position and an id of its own.

Servers send a call in several deltas and number the calls by `index`. Some give two calls one index, or a call no id;
clients and the record then take two calls for one. `streaming` has each delta of a choice pass through `ToolCallIds`,
which gives every call its own index and id."""

from __future__ import annotations

import hashlib

import msgspec


class FunctionDelta(msgspec.Struct):
    """A piece of a function's name and arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolDelta(msgspec.Struct):
    """A piece of a tool call, as a chunk's `delta.tool_calls` lists it."""

    index: int | None = None
    id: str | None = None
    function: FunctionDelta | None = None


class ToolCallIds:
    """The ids of the tool calls of one choice, by their positions: the order in which they began."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._positions_by_server_id: dict[tuple[int, str], int] = {}
        """Positions of the calls to which the server gave an id, by the server's index and id."""
        self._newest_position: dict[int, int] = {}
        """Position of the newest call, by the server's index."""
        self._with_made_id: set[int] = set()
        """Positions of the calls whose ids are the gateway's."""

    def assign(self, delta: ToolDelta, number: int, reply: msgspec.Raw | None) -> bool:
        """Set a delta's index to the position of its call. In the first delta of a call, set its id to the call's id.
        `number`: of the delta in its chunk, for a server that sends no index. `reply`: the reply's `id`. Returns
        whether that changed the delta."""
        before = delta.index, delta.id
        index = number if delta.index is None else delta.index
        position = self._newest_position.get(index)
        if delta.id and position not in self._with_made_id:
            position = self._positions_by_server_id.get((index, delta.id))
        if position is None:
            position = len(self._ids)
            self._ids.append(delta.id or new_call_id(reply, position))
            if delta.id:
                self._positions_by_server_id[index, delta.id] = position
            else:
                self._with_made_id.add(position)
            delta.id = self._ids[position]
        elif delta.id != self._ids[position]:
            delta.id = None  # the call has the gateway's id
        self._newest_position[index], delta.index = position, position
        return before != (delta.index, delta.id)


def new_call_id(reply: msgspec.Raw | None, position: int) -> str:
    """Return an id for a tool call to which the server gave none: always the same one for this `reply` (the reply's id)
    and position. It has nine characters, since some models' chat templates take no other ids."""
    return hashlib.sha256(b"%b %d" % (bytes(reply or b""), position)).hexdigest()[:9]
