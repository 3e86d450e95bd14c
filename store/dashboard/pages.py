"""The data of each page, as a dictionary that its template renders and that `<page>.json` returns."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from store.dashboard.errors import PageError
from store.dashboard.history import History, Row

PAGE = 50
"""Rows of one page of a list."""
_POINTS = 400
"""Points of a curve at most; more steps are averaged."""

_CURVE = """
    WITH scored AS (
      SELECT last_step // $width * $width AS step, split, reward FROM rewards
      WHERE outcome = 'scored' AND model = $model AND branch = $branch AND isfinite(reward)
    )
    SELECT step, split, count(*) AS runs, avg(reward) AS mean,
      CASE WHEN count(*) > 1 THEN 1.96 * stddev_samp(reward) / sqrt(count(*)) END AS half
    FROM scored GROUP BY ALL ORDER BY step
"""
_STEPS = """
    SELECT step, version, published_at, metrics, started_at,
      epoch_us(published_at - started_at) / 1e6 AS duration_s
    FROM checkpoints WHERE model = $model AND branch = $branch ORDER BY step
"""
_THROUGHPUT = """
    SELECT time_bucket(to_seconds($seconds), completed_at) AS at, count(*) / $seconds AS runs_per_s
    FROM trajectories WHERE model = $model AND completed_at IS NOT NULL
    GROUP BY 1 ORDER BY 1
"""
_GROUP_SORTS = {
    "newest": "decided_at DESC, stream_seq DESC",
    "oldest": "decided_at, stream_seq",
    "best": "reward_mean DESC NULLS LAST, stream_seq DESC",
    "worst": "reward_mean NULLS LAST, stream_seq DESC",
    "spread": "reward_max - reward_min DESC NULLS LAST, stream_seq DESC",
}
_TRAJECTORY_SORTS = {
    "newest": "opened_at DESC, trajectory",
    "oldest": "opened_at, trajectory",
    "best": "reward DESC NULLS LAST, trajectory",
    "worst": "reward NULLS LAST, trajectory",
    "longest": "exchanges DESC NULLS LAST, trajectory",
}

_AGREEMENT = """
    WITH one AS (
      SELECT *, row_number() OVER (PARTITION BY project, group_id, trajectory, labeled_by, judge_model
        ORDER BY labeled_at DESC) AS newest
      FROM labels WHERE judge_model IS NOT NULL
    )
    SELECT a.judge_model, a.labeled_by, count(*) AS pairs,
      avg(CASE WHEN sign(a.score - b.score) = sign(a.judge_score - b.judge_score) THEN 1.0 ELSE 0.0 END) AS share
    FROM one a JOIN one b USING (project, group_id, labeled_by, judge_model)
    WHERE a.newest = 1 AND b.newest = 1 AND a.trajectory < b.trajectory AND a.score <> b.score
    GROUP BY ALL ORDER BY ALL
"""
"""The share of pairs that a person and the judge put into the same order, over each person's newest labels."""

Query = Mapping[str, str]


def models(history: History) -> list[str]:
    """The names of the run's models: those of the history in the order of the settings, then those without events."""
    named = [model.name for model in history.config.models]
    found = history.rows(
        "SELECT DISTINCT model FROM policy_checkpoint UNION SELECT DISTINCT model FROM rollout_opened"
    )
    seen = {row["model"] for row in found}
    return list(dict.fromkeys([*(name for name in named if name in seen), *sorted(seen), *named]))


def overview(history: History, query: Query) -> dict[str, Any]:
    """Curves of reward, staleness and training's metrics, and the run's counts."""
    names = models(history)
    chosen = {
        "model": query.get("model") or (names[0] if names else ""),
        "branch": query.get("branch") or "main",
    }
    last = history.row(
        "SELECT max(last_step) AS step FROM rewards WHERE model = $model AND branch = $branch", chosen
    )
    width = 1 + ((last and last["step"]) or 0) // _POINTS
    curve = history.rows(_CURVE, {**chosen, "width": width})
    steps = history.rows(_STEPS, chosen)
    counts = history.row(
        """SELECT
             (SELECT count(*) FROM rollout_opened WHERE model = $model) AS opened,
             (SELECT count(*) FROM rollout_completed WHERE model = $model) AS completed,
             (SELECT count(*) FROM rollout_exchange WHERE model = $model) AS calls,
             (SELECT count(*) FROM group_scored WHERE model = $model AND branch = $branch) AS groups,
             (SELECT count(*) FROM group_discarded WHERE model = $model AND branch = $branch) AS discarded,
             (SELECT count(*) FROM dead_letter) AS dead,
             (SELECT sum(cost_usd) FROM judge_cost WHERE model = $model) AS judge_cost_usd,
             (SELECT avg(len(sampled_ids)) FROM rollout_exchange WHERE model = $model) AS sampled_tokens_mean
        """,
        chosen,
    )
    discards = history.rows(
        """SELECT reason, count(*) AS groups FROM group_discarded WHERE model = $model AND branch = $branch
           GROUP BY 1 ORDER BY 2 DESC""",
        chosen,
    )
    return {
        **chosen, "models": names, "counts": counts, "curve": curve, "width": width, "discards": discards,
        "steps": [{**row, "metrics": row["metrics"] or {}} for row in steps],
    }  # fmt: skip


def groups(history: History, query: Query) -> dict[str, Any]:
    """A list of groups: filtered by model, task, status, split and step, sorted."""
    sort = _choice(query, "sort", _GROUP_SORTS)
    where, parameters = _filters(
        query, model="model = $model", branch="branch = $branch", split="split = $split", status="status = $status",
        reason="reason = $reason", signal="has_signal = ($signal = 'yes')",
        task="(contains(lower(task), lower($task)) OR contains(lower(group_id), lower($task)))",
    )  # fmt: skip
    offset = _page(query) * PAGE
    rows = history.rows(
        f"SELECT * FROM groups WHERE {where} ORDER BY {_GROUP_SORTS[sort]} LIMIT {PAGE + 1} OFFSET {offset}",  # noqa: S608
        parameters,
    )
    return _listed(rows, query, sort, _GROUP_SORTS)


def group(history: History, name: str, query: Query) -> dict[str, Any]:
    """The members of a group side by side: reward, components, the judge's words, the last reply."""
    chosen = {"group": name, "branch": query.get("branch") or "main"}
    scored = history.rows("SELECT * FROM groups WHERE group_id = $group AND branch = $branch", chosen)
    members = history.rows(
        """SELECT * FROM rewards WHERE group_id = $group AND branch = $branch
           ORDER BY reward DESC NULLS LAST, trajectory""",
        chosen,
    )
    verdicts = history.rows(
        "SELECT * FROM verdicts WHERE group_id = $group AND branch = $branch ORDER BY verdict, trajectory",
        chosen,
    )
    runs = {
        row["trajectory"]: row
        for row in history.rows("SELECT * FROM trajectories WHERE group_id = $group ORDER BY attempt", chosen)
    }
    if not scored and not runs:
        raise PageError(404, f"There is no group {name!r} in this run.")
    known = [row["trajectory"] for row in members]
    members += [
        {
            "trajectory": one,
            "reward": run["reward"],
            "outcome": run["outcome"],
            "components": run["rewards"] or {},
        }
        for one, run in runs.items()
        if one not in known
    ]
    replies = {
        row["trajectory"]: row
        for row in history.rows(
            """SELECT trajectory, arg_max(content, (seq, position)) AS content,
                 arg_max(tool_calls, (seq, position)) AS tool_calls
               FROM messages WHERE is_reply AND trajectory IN (SELECT unnest($members)) GROUP BY 1""",
            {"members": [row["trajectory"] for row in members]},
        )
    }
    for member in members:
        member["run"] = runs.get(member["trajectory"])
        member["reply"] = replies.get(member["trajectory"])
        member["verdicts"] = [v for v in verdicts if v["trajectory"] == member["trajectory"]]
    labels = history.rows(
        "SELECT * FROM labels WHERE group_id = $group ORDER BY labeled_at, judge_model", chosen
    )
    for member in members:
        own = [label for label in labels if label["trajectory"] == member["trajectory"]]
        member["labels"] = list({(one["labeled_at"], one["labeled_by"]): one for one in own}.values())
    trained_in = history.rows(
        """SELECT version, step, branch FROM checkpoints WHERE list_contains(groups, $group) ORDER BY step""",
        chosen,
    )
    return {**chosen, "scored": scored, "members": members, "trained_in": trained_in}


def trajectories(history: History, query: Query) -> dict[str, Any]:
    """A list of runs: filtered by model, group, outcome, split and step, sorted."""
    sort = _choice(query, "sort", _TRAJECTORY_SORTS)
    where, parameters = _filters(
        query, model="model = $model", split="split = $split", outcome="outcome = $outcome",
        step="last_step = try_cast($step AS BIGINT)",
        task="(contains(lower(task), lower($task)) OR contains(lower(group_id), lower($task)))",
    )  # fmt: skip
    offset = _page(query) * PAGE
    rows = history.rows(
        f"SELECT * FROM trajectories WHERE {where} ORDER BY {_TRAJECTORY_SORTS[sort]} LIMIT {PAGE + 1} OFFSET {offset}",  # noqa: S608
        parameters,
    )
    return _listed(rows, query, sort, _TRAJECTORY_SORTS)


def trajectory(history: History, name: str, query: Query) -> dict[str, Any]:
    """One run: its messages and tools, and every call's tokens with logprob, loss mask and version."""
    chosen = {"trajectory": name}
    run = history.row("SELECT * FROM trajectories WHERE trajectory = $trajectory", chosen)
    if run is None:
        raise PageError(
            404, f"There is no run {name!r} in this history. A run shows some seconds after it began."
        )
    calls = history.rows(
        "SELECT * FROM exchanges WHERE trajectory = $trajectory ORDER BY seq, choice", chosen
    )
    messages = history.rows(
        "SELECT * FROM messages WHERE trajectory = $trajectory ORDER BY seq, choice, position", chosen
    )
    verdicts = history.rows(
        "SELECT * FROM verdicts WHERE trajectory = $trajectory ORDER BY scored_at, verdict", chosen
    )
    rewards = history.rows("SELECT * FROM rewards WHERE trajectory = $trajectory ORDER BY scored_at", chosen)
    decode = _decoder(history, run["model"])
    for call in calls:
        call["tokens"] = _tokens(call, decode)
        call["prompt"] = [decode(token) for token in call["prompt_ids"] or []]
        call["messages"] = [m for m in messages if (m["seq"], m["choice"]) == (call["seq"], call["choice"])]
        call["tools"] = (_json(call["request"]) or {}).get("tools") or []
    return {
        "run": run,
        "calls": calls,
        "verdicts": verdicts,
        "rewards": rewards,
        "decoded": decode is not str,
    }


def checkpoints(history: History, query: Query) -> dict[str, Any]:
    """A list of checkpoints, newest first."""
    where, parameters = _filters(query, model="model = $model", branch="branch = $branch")
    rows = history.rows(
        f"""SELECT model, version, step, branch, parent, len(groups) AS groups, published_at, metrics
            FROM checkpoints WHERE {where} ORDER BY published_at DESC, step DESC
            LIMIT {PAGE + 1} OFFSET {_page(query) * PAGE}""",  # noqa: S608
        parameters,
    )
    return _listed(rows, query, "newest", {"newest": ""})


def checkpoint(history: History, name: str, query: Query) -> dict[str, Any]:
    """One policy version: what it learned from, what it sampled, who loaded it, and the decisions about it."""
    chosen = {"version": name, "branch": query.get("branch") or "main"}
    row = history.row("SELECT * FROM checkpoints WHERE version = $version AND branch = $branch", chosen)
    sampled = history.rows(
        """SELECT t.split, count(*) AS runs, avg(t.reward) AS reward_mean,
             1.96 * stddev_samp(t.reward) / sqrt(count(*)) AS half
           FROM trajectories t
           WHERE t.outcome = 'scored' AND t.first_step = $step AND t.last_step = $step AND t.model = $model
           GROUP BY 1 ORDER BY 1""",
        {"step": _step(name), "model": name.rpartition("@")[0]},
    )
    if row is None and not sampled:
        raise PageError(404, f"There is no checkpoint {name!r} on branch {chosen['branch']!r} of this run.")
    learned = history.rows(
        """WITH learned AS (
             SELECT unnest(groups) AS group_id, unnest(group_seqs) AS seq FROM checkpoints
             WHERE version = $version AND branch = $branch
           )
           SELECT l.group_id, g.task, g.branch, g.size, g.reward_mean, g.reward_min, g.reward_max, g.decided_at
           FROM learned l LEFT JOIN groups g ON g.group_id = l.group_id AND g.stream_seq = l.seq
             AND g.status = 'scored'
           ORDER BY l.seq, l.group_id""",
        chosen,
    )
    return {
        **chosen, "checkpoint": row, "sampled": sampled, "learned": learned,
        "children": history.rows(
            "SELECT version, branch FROM checkpoints WHERE parent = $version ORDER BY step, branch", chosen
        ),
        "adapters": history.rows("SELECT * FROM adapters WHERE version = $version ORDER BY loaded_at", chosen),
        "decisions": history.rows(
            'SELECT * FROM policy_promoted WHERE version = $version OR other = $version ORDER BY "at"', chosen
        ),
    }  # fmt: skip


def judge(history: History, query: Query) -> dict[str, Any]:
    """Judges: agreement, bias, drift against anchors, cost, and how the scores lie."""
    return {
        "measured": history.rows('SELECT * FROM group_measured ORDER BY "at" DESC LIMIT 200'),
        "costs": history.rows("SELECT * FROM judge_cost ORDER BY day DESC, project, model, judge LIMIT 100"),
        "scores": history.rows(
            """SELECT judge_model, rubric, floor(least(greatest(score, 0), 0.999) * 10) / 10 AS low, count(*) AS runs
               FROM verdicts GROUP BY ALL ORDER BY ALL"""
        ),
        "positions": history.rows(
            """SELECT judge_model, position, count(*) AS runs, avg(score) AS mean FROM verdicts
               WHERE position IS NOT NULL GROUP BY ALL ORDER BY ALL"""
        ),
        "agreement": history.rows(_AGREEMENT),
    }


def decisions(history: History, query: Query) -> dict[str, Any]:
    """Every decision about which version a model's name stands for, newest first."""
    rows = history.rows(
        f'SELECT * FROM policy_promoted ORDER BY "at" DESC LIMIT {PAGE + 1} OFFSET {_page(query) * PAGE}'  # noqa: S608
    )
    return {
        **_listed(rows, query, "newest", {"newest": ""}),
        "models": models(history),
        "versions": [
            row["version"] for row in history.rows(
                "SELECT version FROM checkpoints WHERE branch = 'main' ORDER BY published_at DESC LIMIT 200"
            )
        ],
    }  # fmt: skip


def compare(side: tuple[History, str], other: tuple[History, str], query: Query) -> dict[str, Any]:
    """The curves of two branches, of one run or of two."""
    curves = []
    for history, branch in (side, other):
        data = overview(history, {**query, "branch": branch})
        curves.append({
            "run": str(history.config.run_dir), "branch": branch, "curve": data["curve"], "steps": data["steps"],
            "counts": data["counts"], "model": data["model"],
        })  # fmt: skip
    return {"sides": curves}


def branches(history: History) -> list[str]:
    """The branches of a run, `main` first."""
    found = history.rows(
        "SELECT DISTINCT branch FROM group_scored UNION SELECT DISTINCT branch FROM policy_checkpoint"
    )
    return list(dict.fromkeys(["main", *sorted(row["branch"] for row in found)]))


def _step(version: str) -> int:
    text = version.rpartition("@")[2]
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise PageError(404, f"{version[:80]!r} is no version: it is written <model>@<step>.")
    return int(text)


def _tokens(call: Row, decode: Any) -> list[Row]:
    """Every sampled token of a call. It is trained if it was sampled freely in a call of the task that was not cut."""
    ids, logprobs, forced = (call[name] or [] for name in ("sampled_ids", "logprobs", "forced"))
    trained = not call["side_call"] and call["status"] != "failed"
    return [
        {
            "id": token, "text": decode(token), "logprob": logprobs[i] if i < len(logprobs) else None,
            "forced": bool(forced[i]) if i < len(forced) else False,
            "trained": trained and not (i < len(forced) and forced[i]),
        }
        for i, token in enumerate(ids)
    ]  # fmt: skip


def _decoder(history: History, model: str) -> Any:
    """A function from a token id to its text; `str` where the base model's tokenizer is not on this machine."""
    for one in history.config.models:
        if one.name == model:
            path = Path(one.base) / "tokenizer.json"
            return _load_decoder(path, path.stat().st_mtime) if path.is_file() else str
    return str


@functools.lru_cache(maxsize=4)
def _load_decoder(path: Path, changed: float) -> Any:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return str
    tokenizer = Tokenizer.from_file(str(path))
    return functools.lru_cache(maxsize=65_536)(
        lambda token: tokenizer.decode([token], skip_special_tokens=False)
    )


def _json(text: str | None) -> Any:
    try:
        return msgspec.json.decode(text or "null")
    except msgspec.DecodeError:
        return None


def _choice(query: Query, name: str, choices: Mapping[str, str]) -> str:
    value = query.get(name) or next(iter(choices))
    if value not in choices:
        raise PageError(400, f"{name}={value[:40]!r}: choose one of {', '.join(choices)}.")
    return value


def _page(query: Query) -> int:
    text = query.get("page") or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 7):
        raise PageError(400, f"page={text[:40]!r}: write a number from 0 on.")
    return int(text)


def _filters(query: Query, **conditions: str) -> tuple[str, dict[str, str]]:
    """The conditions whose parameter the query names, joined, with their values."""
    used = {name: value for name in conditions if (value := query.get(name, "").strip())}
    return " AND ".join(conditions[name] for name in used) or "true", used


def _listed(rows: list[Row], query: Query, sort: str, sorts: Mapping[str, str]) -> dict[str, Any]:
    page = _page(query)
    return {
        "rows": rows[:PAGE], "page": page, "more": len(rows) > PAGE, "sort": sort, "sorts": list(sorts),
        "query": {name: value for name, value in query.items() if name != "page"},
    }  # fmt: skip
