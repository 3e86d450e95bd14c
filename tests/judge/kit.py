"""Helpers of the judge's tests."""

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec
import pytest

from judge.models.chat import ContextWindowError, Messages, ModelError, ModelReply
from judge.rewards.compose import open_composer_on_log
from judge.ruler.asking import LoadTranscript
from judge.ruler.rubrics import load_rubric
from judge.ruler.ruler import LlmRuler
from judge.ruler.transcripts import Transcript
from judge.service import Judge
from judge.teacher import open_teacher
from pipeline.chat.conversations import Conversation, Message
from pipeline.config import Config, JudgeConfig
from pipeline.events import ExchangeRecorded, GroupDiscarded, GroupScored, GroupTimedOut, TrajectoryCompleted
from pipeline.log.broker import Broker
from tests.kits import events
from tests.kits.scoring_server import Answer
from tests.kits.settings import with_values
from tests.kits.waiting import until


def transcript(name: str, *said: str, task: str = "Win the game.") -> Transcript:
    """A task, then the agent's turns."""
    messages = [{"role": "user", "content": task}, *({"role": "assistant", "content": s} for s in said)]
    return single(name, tuple(messages))


def single(name: str, messages: tuple[Message, ...], tools: tuple[dict[str, Any], ...] = ()) -> Transcript:
    """A trajectory of one conversation."""
    return Transcript(name, (Conversation(messages, tools),))


def completed(trajectory: str, group: str = "g", reward: float | None = None, **fields: Any) -> TrajectoryCompleted:
    return TrajectoryCompleted(project="p", trajectory=trajectory, model="m", group=group, reward=reward, **fields)


def exchange(
    trajectory: str, reply: str, *, seq: int = 0, task: str = "Win the game.", **fields: Any
) -> ExchangeRecorded:
    """A call of the agent's whose reply is `reply`."""
    request = msgspec.json.encode({"messages": [{"role": "user", "content": task}]})
    response = msgspec.json.encode({"choices": [{"message": {"role": "assistant", "content": reply}}]})
    return events.exchange(trajectory, seq, request=request, response=response, **fields)


IMPORTS_LITELLM = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:.*Pydantic.*:UserWarning",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)
"""Tests whose own process opens a judge model: litellm and its dependencies warn of much."""
TOO_LONG = 413
"""The answer of a model whose context the prompt does not fit."""


class Model:
    """A judge model in the test's own process: `answer` is given the request and says what to reply."""

    def __init__(self, answer: Callable[[dict[str, Any]], Answer], *, cut_off: bool = False) -> None:
        self.answer, self.requests, self.cut_off = answer, list[dict[str, Any]](), cut_off

    async def __call__(self, messages: Messages, schema: dict[str, Any] | None) -> ModelReply:
        request: dict[str, Any] = {"messages": [dict(m) for m in messages], "response_format": schema}
        self.requests.append(request)
        text = self.answer(request)
        if text == TOO_LONG:
            raise ContextWindowError("the prompt is too long")
        if isinstance(text, int):
            raise ModelError(f"answered {text}")
        return ModelReply(text, "test-judge", 100, 10, 0.001, 0.05, self.cut_off)


def loading(transcripts: Iterable[Transcript]) -> LoadTranscript:
    """Returns what members said, by their names."""
    known = {t.trajectory: t for t in transcripts}

    async def load(member: TrajectoryCompleted) -> Transcript:
        return known[member.trajectory]

    return load


def ruler(model: Model, transcripts: Sequence[Transcript] = (), **settings: Any) -> LlmRuler:
    """A ruler over `model`; given transcripts are what its members said."""
    config, load = with_values(JudgeConfig(model="test/judge"), settings), loading(transcripts)
    return LlmRuler(config, load_rubric(), model, load)


def labelled(path: Path, groups: int = 4, wrong: bool = False) -> Path:
    """Write a file of labelled groups, whose texts say what they are worth, or (`wrong`) the opposite."""
    lines = []
    for number in range(groups):
        truth = [0.1 + 0.2 * i for i in range(4)]
        said = list(reversed(truth)) if wrong else truth
        entries = [
            {"messages": [{"role": "assistant", "content": f"quality={s:.1f}"}], "reward": t}
            for s, t in zip(said, truth, strict=True)
        ]
        shared = [{"role": "user", "content": f"task {number}"}]
        lines.append(json.dumps({"id": f"g{number}", "messages": shared, "trajectories": entries}))
    path.write_text("\n".join(lines) + "\n\n")
    return path


@asynccontextmanager
async def judging(broker: Broker, config: Config, judge_hash: str = "j") -> AsyncIterator[Judge]:
    """A judge, which runs within the block, with the rewards of `judge.rewards` and the teacher of `[teacher]`."""
    async with (
        open_composer_on_log(config, broker) if config.judge.rewards else nullcontext() as composer,
        open_teacher(config, broker) as teacher,
        broker.consume("judge") as arrivals,
        broker.consume("judge-timers") as timers,
        anyio.create_task_group() as tg,
    ):
        judge = Judge(broker, config, composer, judge_hash, teacher)
        tg.start_soon(judge.run, arrivals, timers)
        yield judge
        tg.cancel_scope.cancel()


class Expected(NamedTuple):
    """What the log says of a group."""

    members: tuple[str, ...]
    late: tuple[str, ...]
    closed_by: str


async def expected_groups(broker: Broker, size: int) -> dict[str, Expected]:
    """What must become of each group of `size`, counted in the order of the log: a slow machine may let a group time
    out that has all its trajectories in the end."""
    order: dict[str, list[str]] = defaultdict(list)
    """Group to its trajectories in their order; an empty text is the end of its time."""
    for event in (r.event for r in await broker.read_all((TrajectoryCompleted, GroupTimedOut))):
        order[event.group].append(event.trajectory if isinstance(event, TrajectoryCompleted) else "")
    out = {}
    for group, names in order.items():
        before = names[: names.index("")] if "" in names else names
        after = [n for n in names[len(before) :] if n]
        full = len(before) >= size
        out[group] = Expected(tuple(before[:size]), (*before[size:], *after), "size" if full else "timeout")
    return out


async def groups(broker: Broker, count: int, kind: str = "scored") -> list[Any]:
    """The `count` events there are in the end; no more within a moment."""

    async def there() -> list[list[Any]]:
        found = [r.event for r in await broker.read(GroupScored if kind == "scored" else GroupDiscarded)]
        return [found] if len(found) >= count else []

    (found,) = await until(there)
    assert len(found) == count
    return found
