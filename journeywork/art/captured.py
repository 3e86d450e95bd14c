"""From an ART trajectory to the recorded calls that it is made of.

The gateway records each call and adds to each choice of its answer a field that names the call, the *reference*. A
choice keeps it on its way through the program, so a trajectory of choices says which recorded tokens it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypedDict

from openai.types.chat.chat_completion import Choice

from journeywork.art.trajectories import Trajectory

REFERENCE = "journeywork"
"""Field of a choice that the gateway adds: which recorded call the choice is of."""


class Reference(TypedDict):
    """Names one choice of a recorded call."""

    trajectory: str
    reply: str
    choice: int


class NotCapturedError(Exception):
    """A trajectory holds a choice that no recorded call returned, or no trajectory of a step holds a choice."""


def references_of(trajectory: Trajectory, where: str) -> list[Reference]:
    """Return the recorded calls of a trajectory's choices: of the main conversation, then of the further ones.

    Empty for a trajectory without any choice. `where` names the trajectory in the error. Raises `NotCapturedError` for
    a choice without a recorded call."""
    references: list[Reference] = []
    for name, item in _choices(trajectory):
        reference = _reference(item)
        if reference is None:
            raise NotCapturedError(
                f"{where}: {name} names no recorded call, so there are no sampled tokens to train. Make the call with "
                "`model.openai_client()` (or any client with `model.inference_base_url` and "
                "`model.inference_api_key`, read after `model.register`) and append the `Choice` of its answer as it "
                "is. Append a reply that must not be trained as a dictionary: "
                '{"role": "assistant", "content": ...}.'
            )
        if reference not in references:
            references.append(reference)
    return references


def is_captured(trajectory: Trajectory) -> bool:
    """Whether a trajectory has choices, and each of them names a recorded call."""
    choices = [_reference(item) for _, item in _choices(trajectory)]
    return bool(choices) and None not in choices


def _choices(trajectory: Trajectory) -> Iterator[tuple[str, Any]]:
    """Yield each choice of a trajectory after its place, such as `messages_and_choices[2]`."""
    conversations = [("messages_and_choices", trajectory.messages_and_choices)]
    for number, history in enumerate(trajectory.additional_histories):
        conversations.append((f"additional_histories[{number}].messages_and_choices", history.messages_and_choices))
    for name, conversation in conversations:
        for position, item in enumerate(conversation):
            # A trajectory that was read from JSON holds its choices as dictionaries.
            if isinstance(item, Choice) or "finish_reason" in item:
                yield f"{name}[{position}]", item


def _reference(item: Any) -> Reference | None:
    """Return which recorded call a choice (or its dictionary) is of; `None` if it names none."""
    fields = item if isinstance(item, dict) else {"index": item.index, **(item.model_extra or {})}
    call = fields.get(REFERENCE)
    if not isinstance(call, dict) or not {"trajectory", "reply"} <= call.keys():
        return None
    return Reference(trajectory=str(call["trajectory"]), reply=str(call["reply"]), choice=int(fields.get("index", 0)))
