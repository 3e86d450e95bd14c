"""Rows of a data set in the formats of TRL's trainers (its documentation: "Dataset formats and types").

| format | a row is | of |
| --- | --- | --- |
| `sft` | `messages`, `replies`: places of those that the model sampled | each conversation of a run |
| `dpo` | `prompt`, `chosen`, `rejected`: the first reply in which two runs of a group differ | pairs of a group |
| `reward` | `chosen`, `rejected`: two whole conversations | pairs of a group |
| `kto` | `prompt`, `completion`, `label`: a reply, and whether its run is better than its group | each reply |

Pairs are the best run of a group and its worst, the second best and the second worst, and so on while their rewards
differ. Tools are in the column `tools` as JSON, and arguments of tool calls as the text that the model sampled, as TRL
and chat templates take them: columns of a table have one type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from statistics import fmean
from typing import Any

import msgspec

from pipeline.chat.conversations import Conversation, Message, text_of
from pipeline.events.types import REWARD_TOLERANCE
from pipeline.names import outside_model
from store.datasets.runs import Run

Row = dict[str, Any]
_REASONING = ("reasoning", "reasoning_content")
"""Names that servers give to a message's reasoning. Chat templates read the last one."""
_NOT_SAMPLED = ("role", "annotations")
"""Fields of a reply that the model did not write."""


class RowlessError(ValueError):
    """A conversation that no row can hold; the message says why, as the card lists it."""


def rows_of(runs: Sequence[Run], kind: str, may_train: Callable[[str], bool]) -> tuple[list[Row], Counter[str]]:
    """Return the rows of a format, and how many runs, pairs or replies gave none, by the reason. `may_train`: whether a
    model may learn from what a version answered.

    Every row also says its `run` (or `runs`) and `task`."""
    left_out: Counter[str] = Counter()
    left_out.update("a held-out run (split val)" for run in runs if run.split == "val")
    runs = [run for run in runs if run.split != "val"]
    left_out.update(f"a run with outcome {run.outcome}" for run in runs if run.outcome != "scored")
    runs = [run for run in runs if run.outcome == "scored"]
    forbidden = {run.trajectory: [v for v in run.versions if not may_train(v)] for run in runs}
    left_out.update(
        f"a run of the outside model {outside_model(versions[0])}, whose table does not say may_train"
        for versions in filter(None, forbidden.values())
    )
    runs = [run for run in runs if not forbidden[run.trajectory]]
    return list(FORMATS[kind](runs, left_out)), left_out


def _sft(runs: Sequence[Run], left_out: Counter[str]) -> Iterator[Row]:
    """Yield a row for each conversation, up to its last sampled reply."""
    for run, conversation in _usable_conversations(runs, left_out):
        replies = [*conversation.sampled]
        if replies:
            messages = _messages(conversation)[: replies[-1] + 1]
            yield {"messages": messages, "replies": replies, **_about(conversation, run)}


def _kto(runs: Sequence[Run], left_out: Counter[str]) -> Iterator[Row]:
    """Yield a row for each reply, with the label whether its run has a higher reward than its group's mean."""
    means = {name: fmean(r.reward or 0.0 for r in members) for name, members in _groups(runs).items()}
    runs = _with_reward(runs, left_out)
    unequal = [run for run in runs if abs((run.reward or 0.0) - means[run.group_key]) > REWARD_TOLERANCE]
    if ties := len(runs) - len(unequal):
        left_out["a run whose reward is its group's mean"] += ties
    for run, conversation in _usable_conversations(unequal, left_out):
        messages = _messages(conversation)
        for place in filter(None, conversation.sampled):
            yield {
                "prompt": messages[:place],
                "completion": [messages[place]],
                "label": (run.reward or 0.0) > means[run.group_key],
                **_about(conversation, run),
            }


def _dpo(runs: Sequence[Run], left_out: Counter[str]) -> Iterator[Row]:
    """Yield a row for each pair whose first different message is a reply that the model sampled in both runs."""
    for better, worse in _pairs(runs, left_out):
        preferred, rejected = (_messages(r.conversations[0]) for r in (better, worse))
        pairs = zip(preferred, rejected, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        replies = [messages[same : same + 1] for messages in (preferred, rejected)]
        sampled = (same in run.conversations[0].sampled for run in (better, worse))
        if not same or not all(sampled):
            left_out["a pair that does not part in a reply"] += 1
            continue
        yield {
            "prompt": preferred[:same],
            "chosen": replies[0],
            "rejected": replies[1],
            **_about(better.conversations[0], better, worse),
        }


def _reward(runs: Sequence[Run], left_out: Counter[str]) -> Iterator[Row]:
    """Yield a row of two whole conversations for each pair."""
    for better, worse in _pairs(runs, left_out):
        chosen, rejected = (_messages(r.conversations[0]) for r in (better, worse))
        yield {"chosen": chosen, "rejected": rejected, **_about(better.conversations[0], better, worse)}


FORMATS: Mapping[str, Callable[[Sequence[Run], Counter[str]], Iterator[Row]]] = {
    "sft": _sft,
    "dpo": _dpo,
    "kto": _kto,
    "reward": _reward,
}


def _with_reward(runs: Sequence[Run], left_out: Counter[str]) -> list[Run]:
    """Return the runs that have a reward. The others are counted in `left_out`."""
    left_out.update("a run without a reward" for run in runs if run.reward is None)
    return [run for run in runs if run.reward is not None]


def _groups(runs: Sequence[Run]) -> dict[tuple[str, str, str], list[Run]]:
    """Return the runs that have a reward, by their group (`Run.group_key`)."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        if run.reward is not None:
            groups.setdefault(run.group_key, []).append(run)
    return groups


def _pairs(runs: Sequence[Run], left_out: Counter[str]) -> Iterator[tuple[Run, Run]]:
    """Yield pairs of a group's runs, as the module's docstring says, the better run first."""
    runs = _with_reward(runs, left_out)
    # A pair is made of their first conversations.
    usable = {run.trajectory for run, c in _usable_conversations(runs, left_out) if c is run.conversations[0]}
    for members in _groups([run for run in runs if run.trajectory in usable]).values():
        ranked = sorted(members, key=lambda run: (-(run.reward or 0.0), run.trajectory))
        for i in range(len(ranked) // 2):
            better, worse = ranked[i], ranked[-1 - i]
            if (better.reward or 0.0) - (worse.reward or 0.0) > REWARD_TOLERANCE:
                yield better, worse


def _usable_conversations(runs: Sequence[Run], left_out: Counter[str]) -> Iterator[tuple[Run, Conversation]]:
    """Yield each conversation that rows can hold, after its run. The others are counted in `left_out`, by the
    reason."""
    for run in runs:
        for conversation in run.conversations:
            try:
                _messages(conversation)
            except RowlessError as error:
                left_out[str(error)] += 1
            else:
                yield run, conversation


def _messages(conversation: Conversation) -> list[Message]:
    """Return the messages of a conversation as rows have them. Raises `RowlessError`."""
    return [_message(m, sampled=n in conversation.sampled) for n, m in enumerate(conversation.messages)]


def _message(message: Message, *, sampled: bool) -> Message:
    """Return a message with the fields that chat templates read, its content as one text. Raises `RowlessError` if a
    row can't hold it: an image, or what a reply (`sampled`) has beside text, reasoning and tool calls."""
    role, content = str(message.get("role") or "assistant"), message.get("content")
    if role == "prompt":
        raise RowlessError("a plain completion, which has no messages")
    if isinstance(content, list) and any(not isinstance(p, dict) or p.get("type", "text") != "text" for p in content):
        raise RowlessError("a conversation with images, audio or files")
    fields = {name: value for name, value in message.items() if value not in (None, "", [], {})}
    row: Message = {"role": role, "content": text_of(fields.pop("content", None))}
    reasonings = dict.fromkeys(fields.pop(name) for name in _REASONING if isinstance(fields.get(name), str))
    if reasonings:
        row[_REASONING[-1]], *others = reasonings
        if others:
            raise RowlessError("a message with two reasonings")
    calls = fields.pop("tool_calls", [])
    if calls:
        row["tool_calls"] = [_tool_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    row |= {name: str(fields.pop(name)) for name in ("name", "tool_call_id") if name in fields}
    if sampled and (other := sorted(fields.keys() - _NOT_SAMPLED)):
        raise RowlessError(f"a reply with `{other[0]:.40}`, which no row holds")
    return row


def _tool_call(call: Any) -> dict[str, Any]:
    """Return a tool call as rows have it. Raises `RowlessError`."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RowlessError("a tool call that calls no function")
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    named = {"name": str(function.get("name", "")), "arguments": text}
    return {"type": "function", "id": str(call.get("id") or ""), "function": named}


def _about(conversation: Conversation, *runs: Run) -> Row:
    """Return the columns that every format has: tools, if the conversation has any, the run or runs, and the task."""
    names = [run.trajectory for run in runs]
    tools = {"tools": msgspec.json.encode(conversation.tools).decode()} if conversation.tools else {}
    return {**tools, **({"runs": names} if len(runs) > 1 else {"run": names[0]}), "task": runs[0].key}
