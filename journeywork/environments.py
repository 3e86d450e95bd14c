"""`journeywork run-env NAME`: play an environment of the package verifiers, so that the model behind the gateway
learns it.

    journeywork run-env gsm8k --model support --passes 10

Each row of the environment's dataset is a task. Its rubric gives the reward, and its functions are the metrics. With
`--held-out` the rows of the evaluation dataset are played once with the split `val`, and nothing is trained.
verifiers 0.1.12 to 0.3.0 are supported (the extra `verifiers`). Rubrics that compare the attempts of a group with each
other are refused: each attempt is played and scored alone.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import anyio
import openai

from journeywork.command_line import add_gateway, at_least_one, client_of, exit_status, gateway_of
from journeywork.gathering import TooManyExceptionsError
from journeywork.statistics import mean_of_share
from journeywork.trajectory import Trajectory
from journeywork.transport import JourneyworkError

_EMPTY = "EmptyModelResponseError"
"""An error to verifiers. It is the policy that ended its reply at once, so the attempt keeps its reward (0)."""

Row = dict[str, Any]
"""A row of an environment's dataset."""


class UnusableEnvironmentError(Exception):
    """The environment cannot be used. The message says why and what to do."""


def load_environment(name: str, arguments: dict[str, Any]) -> Any:
    """Return what `verifiers.load_environment` finds. Raises `UnusableEnvironmentError`."""
    try:
        verifiers: Any = importlib.import_module("verifiers")
    except ImportError as error:
        raise UnusableEnvironmentError(
            f"verifiers 0.1.12 to 0.3.0 is not installed ({error}): pip install './journeywork[verifiers]'"
        ) from error
    if not hasattr(verifiers, "load_environment"):
        raise UnusableEnvironmentError(
            f"verifiers {getattr(verifiers, '__version__', '')} is installed, which has tasksets and harnesses "
            "in place of `load_environment`; 0.1.12 to 0.3.0 are supported: pip install './journeywork[verifiers]'"
        )
    try:
        environment: Any = verifiers.load_environment(name, **arguments)
    except (ImportError, ValueError, RuntimeError, AttributeError) as error:
        raise UnusableEnvironmentError(f"verifiers cannot load the environment {name!r}: {error}") from error
    if getattr(environment, "requires_group_rollouts", False):
        raise UnusableEnvironmentError(
            f"{name}: its rubric compares attempts with each other; such rubrics are not supported"
        )
    return environment


async def play_row(environment: Any, run: Trajectory, row: Row, sampling: dict[str, Any]) -> float | None:
    """Play one attempt at a row and set the run's metrics. Returns the reward; `None` leaves it to the judge.

    Raises `UnusableEnvironmentError` if the environment reports an error, so that it is no reward."""
    clients: Any = importlib.import_module("verifiers.clients")
    async with openai.AsyncOpenAI(**run.openai) as agent:
        outcome = await environment.run_rollout(
            dict(row), clients.OpenAIChatCompletionsClient(agent), run.model, sampling
        )
    error = outcome.get("error")
    empty = bool(error) and _EMPTY in str(error)
    if error and not empty:
        raise UnusableEnvironmentError(f"row {row['example_id']}: {error}")
    run.metrics.update({**finite_numbers(outcome.get("metrics") or {}), "empty_reply": float(empty)})
    run.metadata["stop_condition"] = str(outcome.get("stop_condition") or "")
    reward = outcome.get("reward")
    return None if reward is None else float(reward)


def finite_numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers among an environment's metrics."""
    return {
        str(name): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def question(row: Row) -> str:
    """Return the last message of a row's prompt, for the judge; an empty string if it is no text."""
    prompt = row.get("prompt")
    if isinstance(prompt, list) and prompt:
        last = prompt[-1]
        prompt = last.get("content") if isinstance(last, dict) else getattr(last, "content", "")
    return prompt if isinstance(prompt, str) else ""


async def play(args: argparse.Namespace, environment: Any, sampling: dict[str, Any]) -> dict[str, Any]:
    """Play the passes and return the mean reward and metrics."""
    rewards: list[float] = []
    metrics: dict[str, list[float]] = {}
    failed = 0

    async def rollout(run: Trajectory, row: Row) -> float | None:
        return await play_row(environment, run, row, sampling)

    rows = (environment.get_eval_dataset if args.held_out else environment.get_dataset)(
        n=args.tasks
    ).to_list()
    async with client_of(gateway_of(args), args) as client:
        for _ in range(1 if args.held_out else args.passes):
            groups = await client.gather(
                args.model, rows, rollout, group_size=args.group_size, concurrency=args.concurrency,
                max_exceptions=args.max_exceptions, split="val" if args.held_out else "train", pinned=args.pinned,
                describe=question, progress=not args.json,
            )  # fmt: skip
            rewards += [reward for group in groups for reward in group.rewards]
            failed += sum(len(group.exceptions) for group in groups)
            for run in (run for group in groups for run in group.trajectories if run.outcome == "scored"):
                for name, value in run.metrics.items():
                    metrics.setdefault(name, []).append(value)
    return {
        "environment": args.name,
        "runs": len(rewards) + failed,
        "failed": failed,
        "reward": mean_of_share(rewards).mean if rewards else None,
        "metrics": {name: sum(values) / len(values) for name, values in sorted(metrics.items())},
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Exits 1 if playing failed, 2 if an argument or the environment cannot be used."""
    parser = argparse.ArgumentParser(
        prog="journeywork run-env",
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", help="an installed environment of verifiers")
    add("--model", required=True, help="name of the policy")
    add("--tasks", type=at_least_one, default=32, help="number of rows (default: 32)")
    add("--group-size", type=at_least_one, default=8, help="attempts at each row (default: 8)")
    add("--passes", type=at_least_one, default=1, help="how often the rows are played (default: 1)")
    add("--held-out", action="store_true", help="play rows of the evaluation dataset once, without training")
    add("--pinned", default="", metavar="VERSION", help="the version that answers; default: the served one")
    add(
        "--sampling",
        default="{}",
        metavar="JSON",
        help="arguments of a model call, such as '{\"max_tokens\": 9}'",
    )
    add("--args", default="{}", metavar="JSON", help="arguments of the environment")
    add_gateway(parser)
    args = parser.parse_args(argv)
    with exit_status((ValueError, UnusableEnvironmentError), (JourneyworkError, TooManyExceptionsError)):
        sampling, arguments = _object("--sampling", args.sampling), _object("--args", args.args)
        result = anyio.run(play, args, load_environment(args.name, arguments), sampling)
    if args.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    for name, value in result.items():
        sys.stdout.write(f"{name:<12} {value}\n")


def _object(flag: str, text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{flag} is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{flag} must be a JSON object, not {text}")
    return parsed


if __name__ == "__main__":
    main()
