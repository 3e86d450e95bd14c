"""`journeywork prompt`: improve a system prompt on tasks with GEPA, to know what words do before weights.

    journeywork prompt support --prompt system.txt --rollout my.agent:play --scenarios tasks.jsonl \\
      --held-out held_out.jsonl --by http://127.0.0.1:8700/v1#master --out better.txt

The rollout takes its system prompt from `run.prompt`, and leaves in `run.metadata` what the writer of prompts should
read of the attempt, such as the answer and what was wrong with it. GEPA (arXiv 2507.19457; the extra `prompt`) plays
the tasks with one prompt after another, and the model `--by` writes the next from what went wrong. Then the first and
the best prompt play the held-out tasks as entrants of one evaluation, which is on the log with both texts (view
`evaluations`). `--out` is written if the best one is better there, by the 95 % interval, and
`journeywork policy promote` takes it:

    journeywork policy promote support@12 --prompt better.txt --replaces system.txt

The model that plays is an entrant as of `journeywork eval`, so an outside model's prompt can be improved as a policy's.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import httpx

from journeywork import command_line
from journeywork.client import AsyncJourneywork
from journeywork.evaluation.entrants import Entrant, parse_entrant
from journeywork.evaluation.loading import add_task_options, load_rollout, load_scenarios
from journeywork.evaluation.playing import play
from journeywork.evaluation.report import text_report
from journeywork.evaluation.results import REWARD, EvaluationReport, TaskResult
from journeywork.gathering import TooManyExceptionsError
from journeywork.transport import JourneyworkError

_PROMPT = "prompt"
"""The one text that GEPA changes."""


class _GepaAdapter:
    """What GEPA calls to play tasks with a prompt, and to learn what the model that writes prompts shall read about the
    attempts. Names and arguments of its methods are those of `gepa.core.adapter.GEPAAdapter`."""

    propose_new_texts = None
    """GEPA's own way to ask for a new prompt is used."""

    def __init__(self, client: AsyncJourneywork, entrant: Entrant, rollout: Any, options: dict[str, Any]) -> None:
        """`options` are those of `play`."""
        self._client, self._entrant, self._rollout, self._options = client, entrant, rollout, options

    def evaluate(self, batch: list[Any], candidate: Mapping[str, str], capture_traces: bool = False) -> Any:
        """Play the tasks `batch` with a prompt. GEPA runs in a thread that the event loop started, so this blocks."""
        from gepa.core.adapter import EvaluationBatch

        entrant = replace(self._entrant, prompt=candidate[_PROMPT])
        work = functools.partial(play, self._client, [entrant], batch, self._rollout, record=False, **self._options)
        results = anyio.from_thread.run(work).entrants[0].tasks
        scores = [task.values.get(REWARD, 0.0) for task in results]
        return EvaluationBatch(results, scores, list(zip(batch, results, strict=True)) if capture_traces else None)

    def make_reflective_dataset(
        self, candidate: Mapping[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """Return each task with the metadata of its run, and its reward and metrics."""

        def row(task: Any, result: TaskResult) -> dict[str, Any]:
            outputs = {"Generated Outputs": list(result.metadata)} if result.metadata else {}
            inputs = task if isinstance(task, str) else json.dumps(task, default=str)
            return {"Inputs": inputs, **outputs, "Feedback": _feedback(result)}

        return {_PROMPT: [row(task, result) for task, result in eval_batch.trajectories]}


def _feedback(result: TaskResult) -> str:
    """Return how the attempts at a task went, as the model that writes prompts reads it."""
    if result.failed:
        return "The attempt ended with an error."
    return "; ".join(f"{name}: {value:.3g}" for name, value in result.values.items()) or "It has no reward."


def _prompt_writer(server: str, key_env: str) -> Callable[[str | list[dict[str, Any]]], str]:
    """Return what GEPA calls as `reflection_lm`: it sends a text or messages to the model of an OpenAI-compatible
    server, and returns the answer. It blocks. `server` is `<base URL>#<model>`, `key_env` the environment variable with
    the key. Raises `ValueError`."""
    url, _, model = server.partition("#")
    if not (url.startswith(("http://", "https://")) and model):
        raise ValueError(f"--by {server}: write <base URL>#<model>; the gateway's base URL ends in /v1")
    if key_env and not os.environ.get(key_env):
        raise ValueError(f"--key-env {key_env}: this environment variable is not set")
    headers = {"Authorization": f"Bearer {os.environ[key_env]}"} if key_env else {}

    def write(prompt: str | list[dict[str, Any]]) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        body = {"model": model, "messages": messages}
        answer = httpx.post(f"{url.rstrip('/')}/chat/completions", json=body, headers=headers, timeout=600)
        return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])

    return write


async def improve(args: argparse.Namespace, entrant: Entrant, writer: Any, first: str) -> EvaluationReport:
    """Return the evaluation of the prompt `first` and of the best one, if that is another, on the held-out tasks."""
    import gepa

    limits = {"concurrency": args.concurrency, "max_exceptions": args.max_exceptions}
    options: dict[str, Any] = {**limits, "progress": False}
    rollout, tasks = load_rollout(args.rollout), load_scenarios(args.scenarios)
    async with command_line.client_of(args) as client:
        optimize = functools.partial(
            gepa.optimize,
            seed_candidate={_PROMPT: first},
            trainset=tasks,
            adapter=_GepaAdapter(client, entrant, rollout, options),
            reflection_lm=writer,
            max_metric_calls=args.runs,
            seed=args.seed,
        )
        best = (await anyio.to_thread.run_sync(optimize)).best_candidate[_PROMPT]
        prompts = dict.fromkeys((first, best))  # one, if no other was better
        named = [(f"{entrant.name} prompt {_prompt_id(prompt)}", prompt) for prompt in prompts]
        return await play(
            client,
            [replace(entrant, name=name, prompt=prompt) for name, prompt in named],
            load_scenarios(args.held_out),
            rollout,
            scenarios=args.held_out,
            rollout_name=args.rollout,
            **options,
        )


def _prompt_id(text: str) -> str:
    """Return how a prompt is named: the beginning of its SHA-256, as `policy.promoted` has it."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Exits 1 if it failed, 2 if an argument is unusable."""
    args = _parser().parse_args(argv)
    unusable, failed = (ImportError, ValueError, OSError), (JourneyworkError, TooManyExceptionsError, httpx.HTTPError)
    with command_line.exit_status(unusable, failed), command_line.output_of_one_object(args.json):
        entrant, writer = parse_entrant(args.entrant), _prompt_writer(args.by, args.key_env)
        first = Path(args.prompt).read_text("utf-8")
        report = anyio.run(improve, args, entrant, writer, first)
        best, better = report.entrants[-1], len(report.entrants) > 1 and report.difference(1, REWARD).low > 0
        if args.out and better:
            Path(args.out).write_text(best.entrant.prompt, "utf-8")
    bodies = [report.request_body(position) for position in range(len(report.entrants))]
    text = (
        json.dumps({"evaluation": report.id, "better": better, "entrants": bodies})
        if args.json
        else text_report(report)
    )
    sys.stdout.write(f"{text}\n")


def _parser() -> argparse.ArgumentParser:
    parser = command_line.command_parser("prompt", __doc__)
    add = parser.add_argument
    add("entrant", metavar="ENTRANT", help="the model that plays")
    add("--prompt", required=True, metavar="FILE", help="the system prompt to begin with")
    add_task_options(parser, scenarios_help="tasks to improve it on: a list, a function that returns one, or JSONL")
    add("--held-out", required=True, metavar="MODULE:NAME|FILE", help="other tasks, for the comparison at the end")
    add("--by", required=True, metavar="URL#MODEL", help="the model that writes prompts, such as the gateway's #master")
    add("--key-env", default="", metavar="NAME", help="variable with the key of --by")
    add("--runs", type=command_line.at_least_one, default=200, help="runs to play until the best is chosen")
    add("--seed", type=int, default=0)
    add("--out", default="", metavar="FILE", help="where to write the best prompt if it is better on those")
    command_line.add_play_options(parser)
    return parser


if __name__ == "__main__":
    main()
