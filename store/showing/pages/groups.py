"""Groups, and one group: its members side by side."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

from pipeline.events import GroupDiscarded
from store.showing.pages import chat, lists
from store.showing.pages.errors import PageError
from store.showing.pages.history import History, Row
from store.showing.pages.overview import branches
from store.showing.pages.trajectories import add_decisions

_COLUMNS = {
    "when": "decided_at",
    "group": "group_id",
    "task": "task",
    "status": "coalesce(reason, status)",
    "size": "size",
    "mean": "reward_mean",
    "lowest": "reward_min",
    "highest": "reward_max",
    "spread": "reward_max - reward_min",
}
_CHOICES = {
    "status": ("scored", "discarded"),
    "split": ("train", "val"),
    "signal": ("yes", "no"),
    "reason": get_args(get_type_hints(GroupDiscarded)["reason"]),
}
_OF_GROUP = "project = $project AND model = $model AND group_id = $group AND branch = $branch"
_AT_STEP = "(group_id, branch) IN (SELECT group_id, branch FROM rewards WHERE last_step = $step)"


def groups(history: History, query: lists.Query) -> dict[str, Any]:
    """Return the page of groups, those of training first. `query` may filter them by model, branch, split, status,
    reason, task, policy step, and whether their rewards differ."""
    rows = lists.list_page(
        history,
        query,
        "groups",
        _COLUMNS,
        first="split = 'train'",
        choices=_CHOICES,
        equal=("model", "branch", "split", "status", "reason"),
        signal="has_signal = ($signal = 'yes')",
        task=lists.TASK_OR_GROUP,
        step=_AT_STEP,
    )
    add_tasks(history, rows["rows"])
    return {**rows, "branches": branches(history)}


def add_tasks(history: History, rows: list[Row]) -> None:
    """Give each group that has no task the first message of its first call as `task`."""
    without = {row["group_id"] for row in rows if not row["task"]}
    if not without:
        return
    first = """SELECT coalesce(nullif("group", ''), trajectory) AS group_id, trajectory, request FROM rollout_exchange
        WHERE seq = 0 AND """
    calls = history.rows(
        f"""SELECT group_id, arg_min(request, trajectory) AS request FROM (
              {first} {lists.is_one_of('"group"', without)} UNION ALL {first} {lists.is_one_of("trajectory", without)}
            ) GROUP BY 1""",  # noqa: S608
        lists.numbered_parameters(without),
    )
    tasks = {row["group_id"]: chat.task_text(row["request"]) for row in calls}
    for row in rows:
        row["task"] = row["task"] or tasks.get(row["group_id"], "")


def group(history: History, name: str, query: lists.Query) -> dict[str, Any]:
    """Return the page of a group: its members with reward, components, the judge's words, the last reply and signals.
    If several models have a group of this name, `query` may name the model and its project; `others` are those that are
    not shown. Raises a 404 `PageError`."""
    named = {"group": name, "branch": lists.branch_of(query)}
    scored = history.rows("SELECT * FROM groups WHERE group_id = $group AND branch = $branch", named)
    played = history.rows(
        """SELECT * FROM trajectories WHERE group_id = $group OR (group_id = '' AND trajectory = $group)
           ORDER BY attempt""",
        named,
    )
    pairs = dict.fromkeys((row["project"], row["model"]) for row in (*scored, *played))
    models = [{"project": project, "model": model} for project, model in pairs]
    shown = next((m for m in models if all(query.get(key) in (None, "", m[key]) for key in m)), None)
    if shown is None:
        raise PageError(404, f"There is no group {name!r} in this history, or none of this model.")
    selection = {**named, **shown}
    runs = {row["trajectory"]: row for row in played if shown.items() <= row.items()}
    scored = [row for row in scored if shown.items() <= row.items()]
    waiting = [] if scored else list(runs.values())
    add_decisions(history, waiting)
    members = _members(history, selection, runs)
    calls = _calls_of(history, [row["trajectory"] for row in members])
    for member in members:
        call = calls.get(member["trajectory"])
        member["reply"] = chat.shown_reply(call["response"], 0) if call else None
    best, worst = _best_and_worst(members)
    tasks = (row["task"] for row in (*scored, *runs.values()))
    named_task: Row = {"group_id": name, "task": next(filter(None, tasks), "")}
    add_tasks(history, [named_task])
    return {
        **selection,
        "others": [{"group_id": name, **m} for m in models if m != shown],
        "scored": scored,
        "task": named_task["task"],
        "waits_until": max((run["waits_until"] for run in waiting if run["waits_until"]), default=None),
        "members": members,
        **_conversations(calls, best, worst),
        "trained_in": history.rows(lists.TRAINED_IN, selection),
    }


def _members(history: History, selection: Row, runs: dict[str, Row]) -> list[Row]:
    """Return the scored members of a group, from the highest reward down, then its other runs (`runs`, by id); each
    with its run, its verdicts and its signals."""
    members = history.rows(
        f"SELECT * FROM rewards WHERE {_OF_GROUP} ORDER BY reward DESC NULLS LAST, trajectory",  # noqa: S608
        selection,
    )
    known = {row["trajectory"] for row in members}
    members += [
        {"trajectory": run_id, "reward": run["reward"], "outcome": run["outcome"], "components": run["rewards"] or {}}
        for run_id, run in runs.items()
        if run_id not in known
    ]
    verdicts = history.rows(
        f'SELECT * FROM verdicts WHERE {_OF_GROUP} ORDER BY verdict, trajectory, "call"',  # noqa: S608
        selection,
    )
    signals = history.rows("SELECT * FROM signals WHERE group_id = $group ORDER BY given_at", selection)
    for member in members:
        member["run"] = runs.get(member["trajectory"])
        for name, rows in (("verdicts", verdicts), ("signals", signals)):
            member[name] = [row for row in rows if row["trajectory"] == member["trajectory"]]
    return members


def _calls_of(history: History, members: list[str]) -> dict[str, Row]:
    """Return by trajectory the first (`first`) and the last request (`last`) of each member, and its last response."""
    if not members:
        return {}
    rows = history.rows(
        f"""SELECT trajectory, arg_min(request, (seq, choice)) AS first, arg_max(request, (seq, -choice)) AS last,
              arg_max(response, (seq, -choice)) AS response
            FROM exchanges WHERE {lists.is_one_of("trajectory", members)} GROUP BY 1""",  # noqa: S608
        lists.numbered_parameters(members),
    )
    return {row["trajectory"]: row for row in rows}


def _best_and_worst(members: list[Row]) -> tuple[str, str]:
    """Return the ids of the runs with the highest and the lowest reward; the second is empty if it is no lower. If no
    member was scored, the first is that of any member, and empty without one."""
    scored = [row for row in members if row["outcome"] == "scored" and row["reward"] is not None]
    if not scored:
        return (members[0]["trajectory"] if members else ""), ""
    best, worst = scored[0], min(scored, key=lambda row: row["reward"])
    return best["trajectory"], worst["trajectory"] if worst["reward"] < best["reward"] else ""


def _conversations(calls: dict[str, Row], best: str, worst: str) -> Row:
    """Return the conversations of a group's best and worst run, which have these ids: `prompt`, the messages with which
    the group began, and `best` and `worst`, the messages after them, or `None`."""
    compared = [run_id for run_id in (best, worst) if run_id in calls]
    opening = chat.request_messages(calls[compared[0]]["first"]) if compared else []

    def conversation(run_id: str) -> Row | None:
        if run_id not in compared:
            return None
        later = chat.new_messages(opening, chat.request_messages(calls[run_id]["last"]))
        messages = [*map(chat.shown_message, later), chat.shown_reply(calls[run_id]["response"], 0)]
        return {"trajectory": run_id, "messages": messages}

    prompt = [chat.shown_message(sent) for sent in opening]
    return {"prompt": prompt, "best": conversation(best), "worst": conversation(worst)}
