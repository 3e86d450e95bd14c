"""Training that a judge alone directs: scenarios that a model writes, RULER's scores, and a comparison with the base.

It uses `journeywork.art`, so a rollout is a function from a scenario to an `art.Trajectory`."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import anyio
import anyio.to_thread

import journeywork.art as art
from examples.common import running, stand_in
from journeywork.art.rewards import ruler_score_group
from journeywork.art.utils import iterate_dataset
from journeywork.scenarios import Writer, write_scenarios
from journeywork.statistics import Estimate, paired_difference

Rollout = Callable[[str, str], Awaitable[art.Trajectory]]
"""Takes a scenario and the name of the version that plays it."""


@dataclass(frozen=True)
class Helper:
    """A model that writes scenarios and judges runs."""

    model: str
    url: str
    """Of an OpenAI-compatible server."""
    key: str

    async def scenarios(self, description: str, count: int) -> list[str]:
        """Return `count` tasks that the model writes for an agent with this description. Raises
        `ScenarioError`."""
        written = await write_scenarios(Writer(self.model, self.url, self.key), description, count)
        return [scenario.task for scenario in written]

    async def score(self, group: art.TrajectoryGroup) -> art.TrajectoryGroup | None:
        """Return the group with RULER's scores as rewards; `None` if the judge gave none, with a line in the log."""
        asked = {"api_base": self.url, "api_key": self.key}
        return await ruler_score_group(group, f"openai/{self.model}", asked, swallow_exceptions=True)


@contextlib.contextmanager
def helper(score: stand_in.Score, tasks: Sequence[str]) -> Iterator[Helper]:
    """Yield the model $HELPER_MODEL at $OPENAI_BASE_URL if there is an OPENAI_API_KEY; else a stand-in, which writes
    `tasks` and judges by `score`."""
    if key := os.environ.get("OPENAI_API_KEY"):
        url = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1")
        yield Helper(os.environ.get("HELPER_MODEL", "gpt-5-mini"), url, key)
        return
    with stand_in.serving(score, tasks) as url:
        yield Helper("stand-in", url, "none")


def backend(args: argparse.Namespace) -> art.LocalBackend:
    """Return a backend whose installation has the example's settings (`examples.common.running.arguments`)."""
    options = ["--config", str(running.config_of(args)), *running.flags(args)]
    return art.LocalBackend(path=str(args.run_dir), up_options=options)


@contextlib.asynccontextmanager
async def installation(
    args: argparse.Namespace, tiny_model: str, score: stand_in.Score, tasks: Sequence[str]
) -> AsyncIterator[tuple[art.TrainableModel[Any], Helper]]:
    """Run an installation with the example's model, by default the tiny one of the example `tiny_model`, and yield the
    model and its helper (`score` and `tasks` are those of `helper`)."""
    base = args.base or str(await anyio.to_thread.run_sync(running.base_model, tiny_model))
    running.make_room(args.run_dir)
    model: art.TrainableModel[Any] = art.TrainableModel(
        name=args.name, project=args.name, base_model=base, base_path=str(args.run_dir)
    )
    with helper(score, tasks) as asked:
        async with backend(args) as started:
            await model.register(started)
            yield model, asked


async def train_and_compare(
    args: argparse.Namespace,
    model: art.TrainableModel[Any],
    scenarios: Sequence[str],
    rollout: Rollout,
    helper: Helper,
    learning_rate: float,
) -> None:
    """Hold out the first `args.held_out` scenarios, train on the others, and print the difference on the held-out ones.
    Raises `SystemExit` if either part is empty, or if the judge scores nothing."""
    if not 0 < args.held_out < len(scenarios):
        raise SystemExit(
            f"--held-out {args.held_out} of {len(scenarios)} scenarios: hold out 1 at least, and leave 1 to train on"
        )
    held_out, training = scenarios[: args.held_out], scenarios[args.held_out :]
    await train(model, training, rollout, helper, steps=args.steps, learning_rate=learning_rate)
    difference = await compare(model, held_out, rollout, helper)
    print(f"judge's score of the last version less that of the base model: {difference}")


async def train(
    model: art.TrainableModel[Any],
    scenarios: Sequence[str],
    rollout: Rollout,
    helper: Helper,
    *,
    steps: int,
    groups: int = 8,
    size: int = 8,
    learning_rate: float = 1e-5,
) -> None:
    """Train `steps` steps of `groups` scenarios, each of them played `size` times and judged. The learning rate falls
    from `learning_rate` to 0. Raises `SystemExit` if the judge scores no group of a step."""
    epochs = -(-steps * groups // len(scenarios))
    for batch in iterate_dataset(scenarios, groups_per_step=groups, num_epochs=epochs, use_tqdm=False):
        if batch.step >= steps:
            return
        played = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(task, model.name) for _ in range(size)) for task in batch.items),
            after_each=helper.score,
            max_exceptions=groups * size // 4,
        )
        if not played:
            raise SystemExit(f"step {batch.step + 1}: {_unscored(helper)}")
        rate = learning_rate * (1 - batch.step / steps)
        await model.train(played, config=art.TrainConfig(learning_rate=rate))
        rewards = [trajectory.reward for group in played for trajectory in group]
        print(f"step {batch.step + 1}: mean score {sum(rewards) / len(rewards):.3f}", flush=True)


async def compare(
    model: art.TrainableModel[Any], scenarios: Sequence[str], rollout: Rollout, helper: Helper, *, attempts: int = 4
) -> Estimate:
    """Play held-out scenarios `attempts` times with the base model and with the newest version. Returns the difference
    of the judge's scores, who sees one run of each together, in two orders; its interval is over the scenarios. Raises
    `SystemExit` if the judge scores no pair."""
    versions = [model.get_inference_name(step) for step in (0, await model.get_step())]
    pairs = await art.gather_trajectory_groups(
        (
            art.TrajectoryGroup((rollout(task, version) for version in versions), metadata={"task": task})
            for task in scenarios
            for _ in range(attempts)
        ),
        after_each=helper.score,
    )
    if not pairs:
        raise SystemExit(f"comparison: {_unscored(helper)}")
    rewards: dict[Any, list[list[float]]] = {}  # a pair that the judge did not score is left out
    for pair in pairs:
        rewards.setdefault(pair.metadata["task"], []).append([run.reward for run in pair])
    means = [list(map(fmean, zip(*scored, strict=True))) for scored in rewards.values()]
    return paired_difference([before for before, _ in means], [after for _, after in means])


def _unscored(helper: Helper) -> str:
    return f"the judge, {helper.model} at {helper.url}, scored no group; the log above says why for each"
