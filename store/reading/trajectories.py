"""Trajectories, and one trajectory: its messages, tools and tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipeline.sampling import NO_DEFAULTS, Defaults, Untrained, loss_mask, sampling_of, untrained_reason
from store.reading import chat
from store.reading.errors import InvalidQueryError, NotFoundError
from store.reading.history import History, Row
from store.reading.lists import TASK_OR_GROUP, Query, as_step, listed

_COLUMNS = {
    "began": "opened_at", "trajectory": "trajectory", "group": "group_id", "outcome": "outcome", "reward": "reward",
    "calls": "exchanges", "tokens": "sampled_tokens", "step": "last_step", "seconds": "duration_s",
}  # fmt: skip
_CHOICES = {"outcome": ("scored", "no_result", "masked", "open"), "split": ("train", "val")}
_SIBLINGS = """
    SELECT trajectory FROM (
      SELECT project, model, "group", trajectory, attempt FROM rollout_opened
      UNION ALL SELECT project, model, "group", trajectory, attempt FROM rollout_completed
    ) WHERE project = $project AND model = $model AND "group" = $group
    GROUP BY trajectory ORDER BY min(attempt), trajectory
"""
CALLS = 20
"""Calls of a trajectory that one page shows."""

Decode = Callable[[int], str]


def trajectories(history: History, query: Query) -> dict[str, Any]:
    """Trajectories by task or group, outcome, split and policy step."""
    return listed(
        history, query, "trajectories", _COLUMNS, key="trajectory", choices=_CHOICES, model="model = $model",
        split="split = $split", outcome="outcome = $outcome", group="group_id = $group", task=TASK_OR_GROUP,
        step="last_step = try_cast($step AS BIGINT)",
    )  # fmt: skip


def trajectory(history: History, name: str, query: Query) -> dict[str, Any]:
    """One trajectory: its messages, and for every call the sampled tokens with logprob, loss mask and version."""
    first = as_step(query.get("from") or "0")
    if first is None:
        raise InvalidQueryError(f"from={query['from'][:40]!r}: write the number of a call.")
    selection = {"trajectory": name, "first": first, "after": first + CALLS}
    run = history.row("SELECT * FROM trajectories WHERE trajectory = $trajectory", selection)
    if run is None:
        raise NotFoundError(
            f"There is no trajectory {name!r} in this history. It shows some seconds after it began."
        )
    calls = history.rows(
        """SELECT * EXCLUDE (prompt_ids) FROM exchanges
           WHERE trajectory = $trajectory AND seq >= $first AND seq < $after ORDER BY seq, choice""",
        selection,
    )
    decode = _decoder(history, run["model"])
    _show_calls(history, run, calls, decode)
    more = history.row(
        "SELECT max(seq) AS last, count(*) AS calls FROM exchanges WHERE trajectory = $trajectory", selection
    )
    group = run["group_id"] or name  # a run without a group is one of its own
    of_group = {"project": run["project"], "model": run["model"], "group": group}
    siblings = [row["trajectory"] for row in history.rows(_SIBLINGS, of_group)]
    place = siblings.index(name) if name in siblings else 0
    return {
        "trajectory": name, "run": run, "metadata": chat.parsed(run["metadata"]),
        "previous": siblings[place - 1] if place else None,
        "next": siblings[place + 1] if place + 1 < len(siblings) else None,
        "calls": calls, "from": first, "last": (more or {}).get("last"),
        "count": (more or {}).get("calls"), "step_of": CALLS,
        "verdicts": history.rows(
            """SELECT * FROM verdicts WHERE group_id = $group AND trajectory = $trajectory
               ORDER BY scored_at, "call", verdict""",
            {**selection, "group": group},
        ),
        "signals": history.rows("SELECT * FROM signals WHERE trajectory = $trajectory ORDER BY given_at", selection),
        "rewards": history.rows(
            "SELECT * FROM rewards WHERE group_id = $group AND trajectory = $trajectory ORDER BY scored_at",
            {**selection, "group": group},
        ),
        "trained_in": history.rows(
            """SELECT version, branch FROM checkpoints
               WHERE project = $project AND model = $model AND list_contains(groups, $group) ORDER BY step""",
            of_group,
        ),
        "decoded": decode is not str,
    }  # fmt: skip


def _show_calls(history: History, run: Row, calls: list[Row], decode: Decode) -> None:
    """Replace what is recorded of the calls of a run by what a page shows: new messages, tools, the reply, tokens."""
    before: list[Any] = []
    replied: Row | None = None
    for call in calls:
        sent = chat.sent(call["request"])
        call["messages"] = [chat.message(message) for message in chat.after(before, sent)]
        if call["messages"] and call["messages"][0] == replied:
            del call["messages"][0]  # it stands as the reply of the call before
        call["earlier"] = len(sent) - len(call["messages"])
        call["tools"] = chat.part(chat.parsed(call["request"]), "tools") or []
        began, opened = call["started_at"], run["opened_at"]
        call["after_s"] = (began - opened).total_seconds() if began and opened else None
        call["reply"] = chat.reply(call["response"], call["choice"])
        call["untrained"] = _untrained(history, call)
        call["tokens"] = _tokens(call, decode)
        before, replied = sent, call["reply"]
        del call["request"], call["response"], call["sampled_ids"], call["logprobs"], call["forced"]


def _untrained(history: History, call: Row) -> Untrained:
    """Why no token of a call is trained; empty if its unforced tokens are."""
    return untrained_reason(
        status=call["status"], side_call=call["side_call"], finish_reason=call["finish_reason"],
        sampling=sampling_of((call["request"] or "").encode(), _sampling_defaults(history, call["model"])),
        mask_truncated=history.config.trainer.loss.mask_truncated,
    )  # fmt: skip


def _sampling_defaults(history: History, model: str) -> Defaults:
    """What vLLM takes for settings that a request does not name, where the base model is a folder of this machine."""
    file = _file_of_base(history, model, "generation_config.json")
    try:
        return msgspec.json.decode(file.read_bytes(), type=Defaults, strict=False) if file else NO_DEFAULTS
    except msgspec.MsgspecError:
        return NO_DEFAULTS


def _file_of_base(history: History, model: str, name: str) -> Path | None:
    """The path of a file of a model's base, if the base is a folder of this machine that has it."""
    paths = (Path(settings.base) / name for settings in history.config.models if settings.name == model)
    return next((path for path in paths if path.is_file()), None)


def _tokens(call: Row, decode: Decode) -> list[Row]:
    """Every sampled token of a call, with what the trainer's loss mask says of it."""
    ids, logprobs, forced = (call[name] or [] for name in ("sampled_ids", "logprobs", "forced"))
    trained = loss_mask(call["untrained"], np.array(forced, np.int8), len(ids))
    return [
        {
            "id": token, "text": decode(token), "logprob": logprobs[i] if i < len(logprobs) else None,
            "forced": bool(forced[i]) if i < len(forced) else False,
            "trained": bool(trained[i]),
        }
        for i, token in enumerate(ids)
    ]  # fmt: skip


def _decoder(history: History, model: str) -> Decode:
    """A function from a token id to its text; `str` where the base model's tokenizer is not on this machine."""
    path = _file_of_base(history, model, "tokenizer.json")
    return _load_decoder(path, path.stat().st_mtime) if path else str


@functools.lru_cache(maxsize=4)
def _load_decoder(path: Path, changed: float) -> Decode:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return str
    tokenizer = Tokenizer.from_file(str(path))
    return functools.lru_cache(maxsize=65_536)(
        lambda token: tokenizer.decode([token], skip_special_tokens=False)
    )
