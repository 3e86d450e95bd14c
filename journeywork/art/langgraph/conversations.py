"""The trajectory that chat completions make up, one after the other.

Each call of a chat model sends the whole conversation so far. A call that begins with all messages of an earlier one
continues that conversation; any other one begins a further *history* of the same trajectory, such as that of a
sub-agent."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from journeywork.art.captured import REFERENCE
from journeywork.art.trajectories import History, Trajectory, get_messages


def add_call(trajectory: Trajectory, request: dict[str, Any], body: bytes) -> None:
    """Add a call to the conversation of `trajectory` that it continues; any other call begins an additional history.
    `body`: the answer, a JSON document or server-sent events. An answer that is no chat completion is left out."""
    reply = _parse_stream(body) if body.lstrip().startswith((b"data:", b":", b"event:")) else _parse_document(body)
    if reply is None or not reply.choices:
        return
    messages, choice = list(request.get("messages") or []), reply.choices[0]
    tools = request.get("tools")
    conversations: list[Trajectory | History] = [trajectory, *trajectory.additional_histories]
    for conversation in conversations:
        earlier = conversation.messages_and_choices
        if not earlier and conversation is trajectory:
            conversation.tools = tools
        if _continues(get_messages(earlier), messages) and conversation.tools == tools:
            earlier += [*messages[len(earlier) :], choice]
            return
    trajectory.additional_histories.append(History(messages_and_choices=[*messages, choice], tools=tools))


def _continues(earlier: list[Any], messages: list[Any]) -> bool:
    """Return whether a request's `messages` begin with all `earlier` ones."""
    return len(earlier) <= len(messages) and all(map(_is_same_message, earlier, messages))


def _is_same_message(message: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two messages say the same. Clients leave fields out that are empty, and some write the arguments of a
    call anew when they send it back."""
    names = ("role", "content", "tool_call_id")
    if any((message.get(name) or None) != (other.get(name) or None) for name in names):
        return False
    return _tool_calls(message) == _tool_calls(other)


def _tool_calls(message: dict[str, Any]) -> list[Any]:
    """Return id, name and arguments of a message's calls of tools."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments: Any = function.get("arguments")
        with contextlib.suppress(ValueError, TypeError):  # what is no JSON is compared as it is
            arguments = json.loads(arguments)
        calls.append((call.get("id"), function.get("name"), arguments))
    return calls


def _parse_document(body: bytes) -> ChatCompletion | None:
    """Return the completion in a JSON document; `None` if it is none."""
    try:
        return ChatCompletion.model_validate_json(body)
    except ValueError:
        return None


def _parse_stream(body: bytes) -> ChatCompletion | None:
    """Return the completion that the chunks of a stream make up, with the references to the recorded call; `None` if
    no choice has ended."""
    from openai.lib.streaming.chat import ChatCompletionStreamState  # 20 ms that few programs need

    state = ChatCompletionStreamState()
    references: dict[int, Any] = {}
    begun: set[int] = set()
    finished = False
    for line in body.split(b"\n"):
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or not data or data == b"[DONE]":
            continue
        try:
            chunk = ChatCompletionChunk.model_validate_json(data)
        except ValueError:
            return None
        for choice in chunk.choices:
            finished |= choice.finish_reason is not None
            if choice.index in begun:
                choice.delta.role = None  # some servers repeat it, and the client's library would join it
            begun.add(choice.index)
            if reference := (choice.model_extra or {}).get(REFERENCE):
                references[choice.index] = reference
        state.handle_chunk(chunk)
    if not finished:
        return None
    completion = state.current_completion_snapshot.model_dump()
    for choice in completion["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        if choice["index"] in references:
            choice[REFERENCE] = references[choice["index"]]
    return ChatCompletion.model_validate(completion)
