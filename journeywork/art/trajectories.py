"""Trajectories and groups of them, as programs of ART build them.

A trajectory holds messages (dictionaries) and choices (replies of the model, as OpenAI's client returned them). Only
choices are trained. A group is made of trajectories, or of coroutines that will return them: then it is a
`PendingGroup`, which plays them when it is awaited."""

from __future__ import annotations

import asyncio
import collections.abc
import inspect
import traceback
from collections.abc import Awaitable, Coroutine, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeAlias, TypedDict, TypeGuard, cast, overload

import pydantic
from openai.types.chat import ChatCompletionMessageParam
from openai.types.chat.chat_completion import Choice
from typing_extensions import Unpack

from journeywork.art.progress import get_gather_context
from journeywork.art.types import Messages, MessagesAndChoices, MetadataValue, Tools


class PydanticException(pydantic.BaseModel):
    """An exception as a value that can be serialised."""

    type: str
    message: str
    traceback: str

    @classmethod
    def from_exception(cls, error: BaseException) -> PydanticException:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        return cls(type=str(type(error)), message=str(error), traceback="".join(lines))


class History(pydantic.BaseModel):
    """A further conversation of a trajectory, such as one of a sub-agent."""

    messages_and_choices: MessagesAndChoices
    tools: Tools | None = None

    def messages(self) -> Messages:
        """Return the conversation as a request takes it."""
        return get_messages(self.messages_and_choices)


class Trajectory(pydantic.BaseModel):
    """One attempt of the agent at a task."""

    messages_and_choices: MessagesAndChoices = []
    tools: Tools | None = None
    additional_histories: list[History] = []
    """Further conversations of the attempt. They are trained with the same advantage."""
    reward: float = 0.0
    initial_policy_version: int | None = None
    final_policy_version: int | None = None
    metrics: dict[str, float | int | bool] = {}
    metadata: dict[str, MetadataValue] = {}
    logs: list[str] = []

    def log(self, message: str) -> None:
        """Add a line to `logs`."""
        self.logs.append(message)

    def messages(self) -> Messages:
        """Return the conversation as a request takes it."""
        return get_messages(self.messages_and_choices)

    def for_logging(self) -> dict[str, Any]:
        """Return the trajectory as JSON can hold it, with `trainable` for each message."""
        shown: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("reward", "initial_policy_version", "final_policy_version", "metrics", "metadata")
        }
        shown["messages"] = [
            {**message, "content": item.message.content, "trainable": True}
            if isinstance(item, Choice)
            else {**message, "trainable": False}
            for message, item in zip(self.messages(), self.messages_and_choices, strict=True)
        ]
        return {**shown, "tools": self.tools, "logs": self.logs}


def get_messages(messages_and_choices: MessagesAndChoices) -> Messages:
    """Return the messages of a conversation: those of the choices, without their empty fields, and the others."""
    return [_message(item) for item in messages_and_choices]


def _message(item: Any) -> ChatCompletionMessageParam:
    """Return a message as a request takes it: that of a choice, or the dictionary itself."""
    if not isinstance(item, Choice):
        return cast(ChatCompletionMessageParam, item)
    message = item.message
    shown: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.tool_calls:
        shown["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
    return cast(ChatCompletionMessageParam, shown)


class PendingGroup(Coroutine[Any, Any, "TrajectoryGroup"]):
    """A group whose trajectories are still being played. Awaiting it plays them concurrently."""

    def __init__(self, trajectories: list[Awaitable[Trajectory]], fields: GroupFields) -> None:
        self.size = len(trajectories)
        """Number of trajectories."""
        self._trajectories = trajectories
        self._run = _play(trajectories, fields)

    def __await__(self) -> Generator[Any, Any, TrajectoryGroup]:
        return self._run.__await__()

    def send(self, value: Any) -> Any:
        return self._run.send(value)

    def throw(self, typ: Any, val: BaseException | object = None, tb: TracebackType | None = None) -> Any:
        error = typ if val is None else val
        return self._run.throw(cast(BaseException, error))

    def close(self) -> None:
        """Drop the group. If it was never awaited, its coroutines are closed too, so that Python does not warn of
        them."""
        self._run.close()
        for trajectory in self._trajectories:
            if isinstance(trajectory, Coroutine):
                trajectory.close()


class GroupFields(TypedDict, total=False):
    """What a group holds beside its trajectories."""

    exceptions: list[BaseException] | None
    metadata: dict[str, MetadataValue] | None
    metrics: dict[str, float | int | bool] | None
    logs: list[str] | None


class TrajectoryGroup(pydantic.BaseModel):
    """Trajectories of one task, which are compared with each other.

    Built from trajectories (and exceptions, which are kept as such), or from awaitables of trajectories: then it has to
    be awaited, and an exception of one of them is raised, unless `gather_trajectory_groups` allows it."""

    trajectories: list[Trajectory]
    exceptions: list[PydanticException] = []
    metadata: dict[str, MetadataValue] = {}
    metrics: dict[str, float | int | bool] = {}
    logs: list[str] = []

    @overload
    def __new__(
        cls, trajectories: Iterable[Trajectory | BaseException], **fields: Unpack[GroupFields]
    ) -> TrajectoryGroup: ...

    @overload
    def __new__(  # type: ignore[misc]  # awaitables make an awaitable, as ART's interface has it
        cls, trajectories: Iterable[Awaitable[Trajectory]], **fields: Unpack[GroupFields]
    ) -> Awaitable[TrajectoryGroup]: ...

    def __new__(  # type: ignore[misc]
        cls,
        trajectories: Iterable[Trajectory | BaseException] | Iterable[Awaitable[Trajectory]] = (),
        **fields: Unpack[GroupFields],
    ) -> TrajectoryGroup | Awaitable[TrajectoryGroup]:
        items = list(trajectories)
        if _are_awaitables(items):
            return PendingGroup(items, fields)
        group = super().__new__(cls)
        # A generator can be read once only: `__init__` gets what was read here.
        object.__setattr__(group, "_given", items)
        return group

    def __init__(
        self,
        trajectories: Iterable[Trajectory | BaseException] | Iterable[Awaitable[Trajectory]] = (),
        **fields: Unpack[GroupFields],
    ) -> None:
        items = self.__dict__.pop("_given", None)
        if items is None:
            items = list(trajectories)
        raised = [*(item for item in items if isinstance(item, BaseException)), *(fields.get("exceptions") or ())]
        super().__init__(
            trajectories=[item for item in items if not isinstance(item, BaseException)],
            exceptions=[PydanticException.from_exception(e) if isinstance(e, BaseException) else e for e in raised],
            metadata=fields.get("metadata") or {},
            metrics=fields.get("metrics") or {},
            logs=fields.get("logs") or [],
        )

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]  # of trajectories, as ART's interface has it
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)


AnyGroup: TypeAlias = "TrajectoryGroup | list[Trajectory | BaseException] | list[Trajectory] | None"
"""A group as a program may give it. `None` stands for one that was dropped."""


def as_groups(items: Iterable[Trajectory | BaseException | AnyGroup]) -> list[TrajectoryGroup]:
    """Return groups as they are and lists as groups. A single trajectory becomes a group of one, so it is compared with
    nothing; a single exception becomes a group without a trajectory. `None` is left out."""
    return [
        item if isinstance(item, TrajectoryGroup) else TrajectoryGroup(item if isinstance(item, list) else [item])
        for item in items
        if item is not None
    ]


def _are_awaitables(items: list[Any]) -> TypeGuard[list[Awaitable[Trajectory]]]:
    """Return whether a group is made of coroutines, which are never mixed with trajectories."""
    return any(inspect.isawaitable(item) for item in items)


async def _play(trajectories: list[Awaitable[Trajectory]], fields: GroupFields) -> TrajectoryGroup:
    """Return the group of what the awaitables return, in their order. An exception of one of them becomes part of the
    group where `gather_trajectory_groups` allows it; otherwise it ends the others and is raised."""
    context = get_gather_context()
    tasks = [asyncio.ensure_future(t) for t in trajectories]
    try:
        for finished in asyncio.as_completed(tasks):
            try:
                trajectory = await finished
            except Exception:
                if not context.allow():
                    raise
            else:
                context.count(trajectory)
    finally:
        await cancel_all(tasks)
    return TrajectoryGroup([task.exception() or task.result() for task in tasks], **fields)


async def cancel_all(tasks: collections.abc.Sequence[asyncio.Future[Any]]) -> None:
    """Cancel the tasks that still run, and wait until they have ended."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
