"""Trajectories, and one trajectory: its messages, tools and tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipeline.chat.sampling import NO_DEFAULTS, Defaults, Untrained, loss_mask, sampling_of, untrained_reason
from pipeline.config import Config, ConfigError, TrainerConfig
from store.showing.pages import chat, lists
from store.showing.pages.errors import PageError
from store.showing.pages.history import History, Row

_COLUMNS = {
    "began": "opened_at",
    "trajectory": "trajectory",
    "group": "group_id",
    "outcome": "outcome",
    "reward": "reward",
    "calls": "exchanges",
    "tokens": "sampled_tokens",
    "step": "last_step",
    "seconds": "duration_s",
}
_CHOICES = {"outcome": ("waits", "scored", "no_result", "masked", "open"), "split": ("train", "val")}
_UNDECIDED = """outcome = 'scored' AND reward IS NULL
    AND (project, trajectory) IN (SELECT (project, trajectory) FROM waiting)"""
"""A run that ended without a reward, and whose group was neither scored nor discarded."""
_REWARDED = """(
    SELECT t.* REPLACE (coalesce(t.reward, r.reward) AS reward) FROM trajectories t LEFT JOIN (
      SELECT project, trajectory, any_value(reward) AS reward FROM rewards WHERE branch = 'main' GROUP BY ALL
    ) r ON r.project = t.project AND r.trajectory = t.trajectory)
"""
"""Runs with the reward for training where the agent reported none."""
_TEXT = "substr(to_json(lower($text))::VARCHAR, 2, length(to_json(lower($text))::VARCHAR) - 2)"
_SAYS = f"""(contains(lower(trajectory || ' ' || coalesce(task, '')), lower($text)) OR trajectory IN (
    SELECT trajectory FROM rollout_exchange
    WHERE contains(lower(request), {_TEXT}) OR contains(lower(response), {_TEXT})))
"""  # noqa: S608
"""The text is in the run's id or task, or in the JSON of one of its calls."""
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


def trajectories(history: History, query: lists.Query) -> dict[str, Any]:
    """Return the page of trajectories. `query` may filter them by task or group, outcome, split, policy step, text,
    reward, day of opening (UTC) and the person whom their metadata names. `add_decisions` adds to each row."""
    by_reward = (query.get("sort") or "").endswith("reward") or query.get("least") or query.get("most")
    outcomes = {"waits": _UNDECIDED, "scored": f"outcome = 'scored' AND NOT ({_UNDECIDED})"}
    page = lists.list_page(
        history,
        query,
        _REWARDED if by_reward else "trajectories",
        _COLUMNS,
        key="trajectory",
        choices=_CHOICES,
        equal=("model", "split"),
        group="group_id = $group",
        task=lists.TASK_OR_GROUP,
        outcome=outcomes.get(query.get("outcome", ""), "outcome = $outcome"),
        step="last_step = try_cast($step AS BIGINT)",
        text=_SAYS,
        least="reward >= $least::DOUBLE",
        most="reward <= $most::DOUBLE",
        since="opened_at >= $since::DATE",
        until="opened_at < $until::DATE + 1",
        user="json_extract_string(metadata, '$.subject') = $user",
    )
    add_decisions(history, page["rows"])
    return page


def add_decisions(history: History, runs: list[Row]) -> None:
    """Add to runs what was decided about their groups: the reward for training if the agent reported none. A run whose
    group is not decided gets the outcome `waits`, and in `waits_until` the time (UTC) until which it waits for
    feedback, `None` if that is over."""
    groups = {run["group_id"] or run["trajectory"] for run in runs if run["reward"] is None}
    rows = (
        history.rows(
            f"""SELECT project, model, group_id, trajectory, reward FROM rewards
            WHERE branch = 'main' AND {lists.is_one_of("group_id", groups)}
            UNION ALL
            SELECT project, model, "group", '', NULL FROM group_discarded
            WHERE branch = 'main' AND {lists.is_one_of('"group"', groups)}""",  # noqa: S608
            lists.numbered_parameters(groups),
        )
        if groups
        else []
    )
    rewards = {(row["project"], row["trajectory"]): row["reward"] for row in rows}
    decided = {(row["project"], row["model"], row["group_id"]) for row in rows}
    now, wait = datetime.now(UTC).replace(tzinfo=None), timedelta(seconds=history.config.feedback.wait_s)
    for run in runs:
        run["waits_until"] = None
        if run["reward"] is not None:
            continue
        run["reward"] = rewards.get((run["project"], run["trajectory"]))
        group = run["project"], run["model"], run["group_id"] or run["trajectory"]
        if run["outcome"] == "scored" and group not in decided:
            run["outcome"] = "waits"
            run["waits_until"] = until if (until := run["completed_at"] + wait) > now else None


def trajectory(history: History, name: str, query: lists.Query) -> dict[str, Any]:
    """Return the page of a trajectory: its messages, and for every call the sampled tokens with logprob, loss mask and
    version. `from` of the query is the first call that is shown. Raises `PageError`."""
    first = lists.as_step(query.get("from") or "0")
    if first is None:
        raise PageError(400, f"from={query['from'][:40]!r}: write the number of a call.")
    selection = {"trajectory": name, "first": first, "after": first + CALLS}
    run = history.row("SELECT * FROM trajectories WHERE trajectory = $trajectory", selection)
    if run is None:
        raise PageError(404, f"There is no trajectory {name!r} in this history. It shows some seconds after it began.")
    add_decisions(history, [run])
    calls = history.rows(
        """SELECT * EXCLUDE (prompt_ids) FROM exchanges
           WHERE trajectory = $trajectory AND seq >= $first AND seq < $after ORDER BY seq, choice""",
        selection,
    )
    decode = _decoder(history, run["model"])
    _show_calls(history, run, calls, decode)
    (counted,) = history.rows(
        "SELECT max(seq) AS last, count(*) AS count FROM exchanges WHERE trajectory = $trajectory", selection
    )
    # A run without a group is one of its own.
    selection |= {"project": run["project"], "model": run["model"], "group": run["group_id"] or name}
    siblings = [row["trajectory"] for row in history.rows(_SIBLINGS, selection)]
    place = siblings.index(name) if name in siblings else 0
    return {
        "trajectory": name,
        "run": run,
        "metadata": chat.parse_json(run["metadata"]),
        "previous": siblings[place - 1] if place else None,
        "next": siblings[place + 1] if place + 1 < len(siblings) else None,
        "calls": calls,
        "from": first,
        **counted,
        "step_of": CALLS,
        "verdicts": history.rows(
            """SELECT * FROM verdicts WHERE group_id = $group AND trajectory = $trajectory
               ORDER BY scored_at, "call", verdict""",
            selection,
        ),
        "signals": history.rows("SELECT * FROM signals WHERE trajectory = $trajectory ORDER BY given_at", selection),
        "rewards": history.rows(
            "SELECT * FROM rewards WHERE group_id = $group AND trajectory = $trajectory ORDER BY scored_at", selection
        ),
        "trained_in": history.rows(lists.TRAINED_IN, selection),
        "decoded": decode is not str,
    }


def _show_calls(history: History, run: Row, calls: list[Row], decode: Decode) -> None:
    """Replace what is recorded of the calls of a run by what a page shows: new messages, tools, the reply, tokens."""
    before: list[Any] = []
    replied: Row | None = None
    mask_truncated = _trainer_of(history.config, run["model"]).loss.mask_truncated
    for call in calls:
        sent = chat.request_messages(call["request"])
        call["messages"] = [chat.shown_message(message) for message in chat.new_messages(before, sent)]
        if call["messages"] and replied and chat.is_same_reply(call["messages"][0], replied):
            del call["messages"][0]  # it stands as the reply of the call before
        call["earlier"] = len(sent) - len(call["messages"])
        call["tools"] = chat.value_at(chat.parse_json(call["request"]), "tools") or []
        began, opened = call["started_at"], run["opened_at"]
        call["after_s"] = (began - opened).total_seconds() if began and opened else None
        call["reply"] = chat.shown_reply(call["response"], call["choice"])
        call["untrained"] = _untrained(history, call, mask_truncated=mask_truncated)
        call["tokens"] = _tokens(call, decode)
        before, replied = sent, call["reply"]
        del call["request"], call["response"], call["sampled_ids"], call["logprobs"], call["forced"]


def _untrained(history: History, call: Row, *, mask_truncated: bool) -> Untrained:
    """Return why no token of a call is trained; empty if its unforced tokens are."""
    return untrained_reason(
        status=call["status"],
        side_call=call["side_call"],
        finish_reason=call["finish_reason"],
        sampling=sampling_of((call["request"] or "").encode(), _sampling_defaults(history, call["model"])),
        mask_truncated=mask_truncated,
    )


def _trainer_of(config: Config, model: str) -> TrainerConfig:
    """Return the trainer's settings of a model; the shared ones for a model that is no longer in the settings, or whose
    table holds what this version does not know."""
    try:
        return config.trainer_of(config.model(model))
    except ConfigError:
        return config.trainer


def _sampling_defaults(history: History, model: str) -> Defaults:
    """Return what vLLM takes for settings that a request does not name: those of the base model's
    `generation_config.json`, if the base is a folder of this machine."""
    file = _file_of_base(history, model, "generation_config.json")
    try:
        return msgspec.json.decode(file.read_bytes(), type=Defaults, strict=False) if file else NO_DEFAULTS
    except msgspec.MsgspecError:
        return NO_DEFAULTS


def _file_of_base(history: History, model: str, name: str) -> Path | None:
    """Return the path of a file of a model's base, if the base is a folder of this machine that has it."""
    paths = (Path(settings.base) / name for settings in history.config.models if settings.name == model)
    return next((path for path in paths if path.is_file()), None)


def _tokens(call: Row, decode: Decode) -> list[Row]:
    """Return every sampled token of a call: id, text, logprob, whether it was forced, and whether it is trained."""
    ids, logprobs, forced = (call[name] or [] for name in ("sampled_ids", "logprobs", "forced"))
    trained = loss_mask(call["untrained"], np.array(forced, np.int8), len(ids))
    return [
        {
            "id": token,
            "text": decode(token),
            "logprob": logprobs[i] if i < len(logprobs) else None,
            "forced": bool(forced[i]) if i < len(forced) else False,
            "trained": bool(trained[i]),
        }
        for i, token in enumerate(ids)
    ]


def _decoder(history: History, model: str) -> Decode:
    """Return the function from a token id to its text; `str` if the base model's tokenizer is not on this machine."""
    path = _file_of_base(history, model, "tokenizer.json")
    return _load_decoder(path, path.stat().st_mtime) if path else str


@functools.lru_cache(maxsize=4)
def _load_decoder(path: Path, changed: float) -> Decode:
    """Return the decoder of a tokenizer's file. `changed`, the file's time of modification, is a part of the cache's
    key: a file that changes is loaded again."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return str
    tokenizer = Tokenizer.from_file(str(path))
    return functools.lru_cache(maxsize=65_536)(lambda token: tokenizer.decode([token], skip_special_tokens=False))
