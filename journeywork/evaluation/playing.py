"""Every entrant plays the same tasks, one entrant after the other.

`play` is `client.evaluate` of the SDK, and the commands `journeywork eval` and `prompt` call it. An *entrant*
(`journeywork.evaluation.entrants`) is who plays: a policy version or an outside model. Its attempts are played by
`journeywork.gathering.gather`, a group for each task."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence

import anyio

from journeywork import gathering
from journeywork.evaluation.entrants import Entrant, parse_entrant
from journeywork.evaluation.results import EntrantResult, EvaluationReport, result_of
from journeywork.gathering import Client, Rollout, Task
from journeywork.trajectory import Trajectory
from journeywork.versions import resolve

_MAX_GROUP = 190
"""Characters of a group's name; the gateway takes 200."""


async def play(
    client: Client,
    entrants: Sequence[Entrant | str],
    tasks: Iterable[Task],
    rollout: Rollout[Task],
    *,
    attempts: int = 1,
    concurrency: int = 64,
    max_exceptions: float = 0.1,
    progress: bool = True,
    scenarios: str = "",
    rollout_name: str = "",
    record: bool = True,
    baseline: EntrantResult | None = None,
) -> EvaluationReport:
    """Let every entrant play `attempts` runs of each held-out task, which is never trained, and return the results.

    The first entrant is the baseline of the differences. A policy plays with one version: the one that is named, or the
    one that the model's name stood for when the evaluation began, however long others play before it. `concurrency`,
    `max_exceptions` and `progress` are those of `gather`. `scenarios` and `rollout_name` are recorded. `record` sends
    the results of each entrant to the log. `baseline` is an entrant that has played these tasks before: it is entrant 0
    and does not play again.
    Raises `ValueError` if there is no entrant or no task, `attempts` is below 1, two entrants have one name, or the
    gateway has no such model or version; `TooManyExceptionsError` and `JourneyworkError` as `gather`."""
    task_list = list(tasks)
    parsed_entrants = [parse_entrant(e) if isinstance(e, str) else e for e in entrants]
    if attempts < 1:
        raise ValueError(f"attempts must be at least 1, not {attempts}")
    if not task_list:
        raise ValueError(f"there are no tasks in {scenarios or 'the given list'}")
    evaluation = f"e-{secrets.token_hex(6)}"
    names = [task_name(task, n) for n, task in enumerate(task_list)]
    versions = await versions_of(client, parsed_entrants)
    results: list[EntrantResult] = [] if baseline is None else [baseline]
    if baseline is not None and [task.task for task in baseline.tasks] != names:
        raise ValueError(f"{baseline.entrant.name} played other tasks, so it is no baseline of these")
    for position, (entrant, version) in enumerate(zip(parsed_entrants, versions, strict=True), len(results)):
        group_names = [f"{evaluation}-{position}-{number}-{name}"[:_MAX_GROUP] for number, name in enumerate(names)]
        began = time.monotonic()
        groups = await gathering.gather(
            client,
            entrant.model,
            range(len(task_list)),
            _rollout_by_number(rollout, task_list, entrant.prompt, concurrency),
            group_size=attempts,
            concurrency=concurrency,
            split="val",
            pinned=version,
            name=group_names.__getitem__,
            describe=names.__getitem__,
            max_exceptions=max_exceptions,
            progress=progress,
        )
        results.append(result_of(entrant, version, groups, names, attempts, time.monotonic() - began))
    report = EvaluationReport(evaluation, scenarios, rollout_name, tuple(results))
    if record:
        for position in range(len(results)):
            await client.record_evaluation(report.request_body(position))
    return report


def _rollout_by_number(rollout: Rollout[Task], tasks: Sequence[Task], prompt: str, concurrency: int) -> Rollout[int]:
    """Return a rollout that takes the number of a task, and plays that task with `rollout` and a system prompt.

    `gather` plays numbers in place of tasks, so that two equal tasks are two groups."""
    threads = anyio.CapacityLimiter(max(concurrency, 1))

    async def play_number(run: Trajectory, number: int) -> None:
        run.prompt = prompt
        await gathering.call_rollout(rollout, run, tasks[number], threads)

    return play_number


async def versions_of(client: Client, entrants: Sequence[Entrant]) -> list[str]:
    """Return the version that each entrant plays with, in their order; empty for an outside model.

    Raises `ValueError` if there is no entrant, two have one name, or the gateway does not have a model or a version."""
    names = [entrant.name for entrant in entrants]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"an evaluation needs entrants with different names, not {names}")
    return await resolve(client, [entrant.version or entrant.model for entrant in entrants])


def task_name(task: object, number: int) -> str:
    """Return a text's first line, the `id` of a mapping or object, or the task's number."""
    if isinstance(task, str):
        label: object = task.strip().partition("\n")[0]
    else:
        label = task.get("id") if isinstance(task, dict) else getattr(task, "id", None)
    text = "" if label is None else "".join(c for c in str(label) if c.isprintable())
    return text[:120] or str(number)
