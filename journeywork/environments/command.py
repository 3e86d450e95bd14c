"""`journeywork run-env NAME`: play an environment of another project, so that the model behind the gateway learns it.

    journeywork run-env verifiers:gsm8k --model support --passes 10
    journeywork run-env http://127.0.0.1:8000 --model support --tasks 64     # an OpenEnv server

`verifiers:NAME` is an installed environment of the package verifiers, a URL is an OpenEnv server. With `--held-out` the
held-out tasks are played once with the split `val`, and nothing is trained.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Sequence
from typing import Any

import anyio

from journeywork.command_line import add_gateway, at_least_one, client_of, exit_status, gateway_of
from journeywork.environments.from_openenv import OpenEnvScenarios
from journeywork.environments.from_verifiers import VerifiersScenarios
from journeywork.environments.scenarios import Scenario, ScenarioError, Scenarios
from journeywork.gathering import TooManyExceptionsError
from journeywork.statistics import mean_of_share
from journeywork.trajectory import Trajectory
from journeywork.transport import JourneyworkError


def load_scenarios(args: argparse.Namespace) -> Scenarios:
    """Return the environment that the command names. Raises `ScenarioError` or `ValueError`."""
    sampling = _object("--sampling", args.sampling)
    kind, colon, name = args.name.partition(":")
    if args.name.startswith(("http://", "https://")):
        return OpenEnvScenarios(
            args.name, system_prompt=args.prompt, action_field=args.action_field, max_steps=args.max_steps,
            sampling=sampling,
        )  # fmt: skip
    if kind == "verifiers" and colon and name:
        return VerifiersScenarios(name, _object("--args", args.args), sampling)
    raise ValueError(
        f"{args.name!r} is no environment: write verifiers:<name>, or the URL of an OpenEnv server"
    )


async def play(args: argparse.Namespace, scenarios: Scenarios) -> dict[str, Any]:
    """Play the passes and return rewards and metrics."""
    rewards: list[float] = []
    metrics: dict[str, list[float]] = {}
    failed = 0

    async def rollout(run: Trajectory, task: Scenario) -> float | None:
        return await scenarios.play(run, task)

    async with client_of(gateway_of(args), args) as client:
        tasks = scenarios.tasks(args.held_out, args.tasks)
        for _ in range(1 if args.held_out else args.passes):
            groups = await client.gather(
                args.model, tasks, rollout, group_size=args.group_size, concurrency=args.concurrency,
                max_exceptions=args.max_exceptions, split="val" if args.held_out else "train", pinned=args.pinned,
                describe=lambda task: task.description, progress=not args.json,
            )  # fmt: skip
            rewards += [reward for group in groups for reward in group.rewards]
            failed += sum(len(group.exceptions) for group in groups)
            for run in (run for group in groups for run in group.trajectories if run.outcome == "scored"):
                for name, value in run.metrics.items():
                    metrics.setdefault(name, []).append(value)
        policies = {policy["model"]: policy["version"] for policy in await client.policies()}
    found = mean_of_share(rewards)
    return {
        "environment": args.name,
        "runs": len(rewards) + failed,
        "failed": failed,
        "reward": found.mean if rewards else None,
        "metrics": {name: sum(values) / len(values) for name, values in sorted(metrics.items())},
        "version": policies.get(args.model, ""),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Exits 1 if playing failed, 2 if an argument or the environment cannot be used."""
    args = _parser().parse_args(argv)
    with exit_status((ValueError, ScenarioError), (JourneyworkError, TooManyExceptionsError)):
        result = anyio.run(play, args, load_scenarios(args))
    if args.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    for name, value in result.items():
        sys.stdout.write(f"{name:<12} {value}\n")


def _object(flag: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"{flag} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{flag} must be a JSON object, not {text}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="journeywork run-env",
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", help="verifiers:<name>, or the URL of an OpenEnv server")
    add("--model", required=True, help="name of the policy")
    add("--tasks", type=at_least_one, default=32, help="number of tasks (default: 32)")
    add("--group-size", type=at_least_one, default=8, help="attempts at each task (default: 8)")
    add("--passes", type=at_least_one, default=1, help="how often the tasks are played (default: 1)")
    add("--held-out", action="store_true", help="play the held-out tasks once, without training")
    add(
        "--pinned",
        default="",
        metavar="VERSION",
        help="the policy version that answers; default: the served one",
    )
    add(
        "--sampling",
        default="",
        metavar="JSON",
        help="arguments of each model call, such as '{\"max_tokens\": 512}'",
    )
    add("--args", default="", metavar="JSON", help="verifiers: arguments of the environment")
    add("--prompt", default="", help="OpenEnv: system prompt")
    add("--action-field", default="", help="OpenEnv: field of the action that the reply fills")
    add(
        "--max-steps",
        type=at_least_one,
        default=20,
        help="OpenEnv: steps of an episode at most (default: 20)",
    )
    add_gateway(parser)
    return parser


if __name__ == "__main__":
    main()
