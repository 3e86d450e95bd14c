"""Plays groups while the backend trains, with a bounded staleness, and evaluates versions meanwhile.

Workers (`_play`) put groups into a stream, from which `_train` takes the batch of each step; it puts the steps to
evaluate into another stream, which `_evaluate` reads. Each ends when the stream before it is closed: the last worker
that has no further scenario closes the first one, the end of training the second one."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Generic, TypeAlias, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from journeywork.art.backend import RemoteBackend
from journeywork.art.model import TrainableModel
from journeywork.art.training import can_train
from journeywork.art.trajectories import Trajectory, TrajectoryGroup
from journeywork.gathering import cancellation_as_failure
from journeywork.transport import plain_errors

log = logging.getLogger("journeywork.art")

ScenarioT = TypeVar("ScenarioT")
ConfigT = TypeVar("ConfigT")
RolloutFn: TypeAlias = Callable[[TrainableModel[Any], ScenarioT, ConfigT], Awaitable[TrajectoryGroup]]
Evaluated: TypeAlias = "list[Trajectory | TrajectoryGroup] | list[Trajectory] | list[TrajectoryGroup]"
EvalFn: TypeAlias = Callable[[TrainableModel[Any], int, ConfigT], Awaitable["Evaluated | dict[str, Evaluated]"]]

_STATE = "_pipeline_trainer"
"""Key of what is played and evaluated in a model's state."""
_MOST_EQUAL = 100
"""Groups with equal rewards since the last step, by `min_batch_size`, at which training ends."""


class PipelineTrainer(Generic[ScenarioT, ConfigT]):
    """`num_rollout_workers` play scenarios, and each step trains what was played since the last: `min_batch_size` to
    `max_batch_size` groups. A group begins only with a version that is at most `max_steps_off_policy` steps before the
    step that is trained, and is left out if it became older.

    It ends after `max_steps` steps, with the scenarios, or when 100 times `min_batch_size` groups since the last step
    had equal rewards; the others since then are a last step. A trainer that is made anew goes on with the next
    scenario."""

    def __init__(
        self,
        model: TrainableModel[Any],
        backend: RemoteBackend,
        rollout_fn: RolloutFn[ScenarioT, ConfigT],
        scenarios: AsyncIterator[ScenarioT] | Iterable[ScenarioT],
        config: ConfigT,
        eval_fn: EvalFn[ConfigT] | None = None,
        *,
        num_rollout_workers: int = 16,
        min_batch_size: int = 4,
        max_batch_size: int | None = None,
        max_steps_off_policy: int = 4,
        learning_rate: float = 1e-5,
        max_steps: int | None = None,
        eval_every_n_steps: int = 20,
        eval_at_start: bool = True,
        total_scenarios: int | None = None,
        **options: Any,
    ) -> None:
        """`options` are those of `backend.train`, such as `loss_fn`. `total_scenarios` has no effect: the progress is
        what `model.log` writes. Raises `ValueError` for a value out of range."""
        most = max_batch_size if max_batch_size is not None else 10 * min_batch_size
        if num_rollout_workers < 1 or min_batch_size < 1 or most < min_batch_size:
            raise ValueError(
                "num_rollout_workers and min_batch_size must be at least 1, and max_batch_size at least min_batch_size"
            )
        if max_steps_off_policy < 0 or eval_every_n_steps < 0 or (max_steps or 0) < 0:
            raise ValueError("max_steps_off_policy, eval_every_n_steps and max_steps must be at least 0")
        self.model, self.backend, self.rollout_fn, self.config = model, backend, rollout_fn, config
        self.eval_fn, self.eval_every_n_steps, self.eval_at_start = eval_fn, eval_every_n_steps, eval_at_start
        self.max_steps, self.max_steps_off_policy = max_steps, max_steps_off_policy
        self._workers, self._sizes = num_rollout_workers, (min_batch_size, most)
        self._most_equal = _MOST_EQUAL * min_batch_size
        self._options = {"learning_rate": learning_rate, **options}
        self._scenarios = scenarios if isinstance(scenarios, AsyncIterator) else iter(scenarios)
        self._drawing = anyio.Lock()
        self._drawn = self._evaluated = self._step = self._stale = self._equal = 0
        self._served = anyio.Event()
        """Set unless a step is trained whose version the next groups have to begin with."""

    async def train(self) -> None:
        """Play, train and evaluate until the end.

        What `rollout_fn` raises is logged, and its scenario left out. A group that it returns with exceptions only
        ends the training with `RuntimeError`. Raises what `backend.train` raises."""
        self._step = await self.model.get_step()
        state = (self.model.read_state() or {}).get(_STATE, {})
        self._evaluated = int(state.get("last_eval_step", self._step))
        while self._drawn < int(state.get("scenario_offset", 0)) and await self._next_scenario() is not None:
            pass  # an earlier trainer has played it
        most_waiting = max(1, self.max_steps_off_policy * self._sizes[1])
        put, played = anyio.create_memory_object_stream[TrajectoryGroup](most_waiting)
        due, evaluations = anyio.create_memory_object_stream[int](float("inf"))
        with plain_errors(Exception):
            async with anyio.create_task_group() as evaluating, due:
                evaluating.start_soon(self._evaluate, evaluations)
                if self.eval_at_start:
                    due.send_nowait(self._step)
                async with anyio.create_task_group() as playing, put, played:
                    for _ in range(self._workers):
                        playing.start_soon(self._play, put.clone())
                    put.close()
                    await self._train(played, due)
                    playing.cancel_scope.cancel()

    # -- playing -----------------------------------------------------------------------------------------------------

    async def _next_scenario(self) -> ScenarioT | None:
        """Return the next scenario and count it; `None` after the last. Only one worker draws at a time."""
        source = self._scenarios
        async with self._drawing:
            scenario = await anext(source, None) if isinstance(source, AsyncIterator) else next(source, None)
            self._drawn += scenario is not None
        return scenario

    async def _play(self, put: MemoryObjectSendStream[TrajectoryGroup]) -> None:
        """Play scenarios until they end, and send their groups to `put`. `_train` ends when every worker has closed
        its own `put`."""
        async with put:
            while (scenario := await self._next_scenario()) is not None:
                await self._served.wait()
                version = self._step
                try:
                    measured = self.model.metrics_builder("train").measure("time/step_actor_s")
                    with measured, cancellation_as_failure("the rollout"):
                        group = await self.rollout_fn(self.model, scenario, self.config)
                except Exception:
                    log.exception("a rollout failed; its scenario is left out: %r", scenario)
                    continue
                metadata = scenario.get("metadata") if isinstance(scenario, dict) else None
                for name, value in (metadata or {}).items():
                    if isinstance(value, str | int | float | bool | None):
                        group.metadata[name if name == "scenario_id" else f"scenario_{name}"] = value
                for trajectory in group.trajectories:
                    if trajectory.initial_policy_version is None:
                        trajectory.initial_policy_version = version
                    if trajectory.final_policy_version is None:
                        trajectory.final_policy_version = self._step
                await put.send(group)

    # -- training ----------------------------------------------------------------------------------------------------

    async def _train(
        self, played: MemoryObjectReceiveStream[TrajectoryGroup], due: MemoryObjectSendStream[int]
    ) -> None:
        """Take steps on the groups that were `played`, log each, and put every version that has to be evaluated into
        `due`. It ends after `max_steps`, when no more groups come, and after a step before which too many groups had
        equal rewards."""
        last = None if self.max_steps is None else self._step + self.max_steps
        is_last = False
        while not is_last and (last is None or self._step < last):
            self._served.set()
            waited, self._equal = time.monotonic(), 0
            batch = await self._batch(played)
            began, is_last = time.monotonic(), self._equal >= self._most_equal
            if not batch:
                break
            if not self.max_steps_off_policy:
                self._served = anyio.Event()
            result = await self.backend.train(self.model, batch, **self._options)
            ages = [self._step - version for group in batch if (version := _oldest_version(group)) is not None]
            self._step = result.step
            metrics = {
                "throughput/step_trainer_idle_s": began - waited,
                "discarded_stale_groups": float(self._stale),
                "steps_off_policy": sum(ages) / len(ages) if ages else 0.0,
                "time/step_trainer_s": time.monotonic() - began,
                **result.metrics,
            }
            await self.model.log(batch, split="train", step=self._step, metrics=metrics)
            if self.eval_every_n_steps and self._step - self._evaluated >= self.eval_every_n_steps:
                due.send_nowait(self._step)
                self._evaluated = self._step
            state = {"scenario_offset": self._drawn, "training_step": self._step, "last_eval_step": self._evaluated}
            self.model.merge_state({_STATE: state})

    async def _batch(self, played: MemoryObjectReceiveStream[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Return the groups of a step: what was played by now, and at least `min_batch_size`; fewer or none at the end.
        Stale groups and those with equal rewards are counted and left out."""
        least, most = self._sizes
        batch: list[TrajectoryGroup] = []
        while len(batch) < most and self._equal < self._most_equal:
            try:
                group = played.receive_nowait() if len(batch) >= least else await played.receive()
            except (anyio.EndOfStream, anyio.WouldBlock):
                break
            if not group.trajectories and group.exceptions:
                first = group.exceptions[0]
                raise RuntimeError(f"every rollout of a group failed, the first by {first.type}: {first.message}")
            if (version := _oldest_version(group)) is not None and self._step - version > self.max_steps_off_policy:
                self._stale += 1
            elif can_train(group):
                batch.append(group)
            else:
                self._equal += 1
        if self._equal >= self._most_equal:
            log.warning(
                "training ends: %d groups since the last step had equal rewards. Look at the reward, or lower the "
                "learning rate",
                self._equal,
            )
        return batch

    # -- evaluation --------------------------------------------------------------------------------------------------

    async def _evaluate(self, due: MemoryObjectReceiveStream[int]) -> None:
        """Evaluate the version of each step in `due` and log the results. An evaluation that raises is left out."""
        async with due:
            async for step in due:
                if self.eval_fn is None:
                    continue
                try:
                    measured = self.model.metrics_builder("eval").measure("time/step_eval_s")
                    with measured, cancellation_as_failure("the evaluation"):
                        evaluated = await self.eval_fn(self.model, step, self.config)
                except Exception:
                    log.exception("the evaluation of step %d failed", step)
                    continue
                splits = evaluated if isinstance(evaluated, dict) else {"val": evaluated}
                for split, items in splits.items():
                    groups = [item for item in items if isinstance(item, TrajectoryGroup)]
                    if alone := [item for item in items if isinstance(item, Trajectory)]:
                        groups.append(TrajectoryGroup(alone))
                    await self.model.log(groups, split=split, step=step)


def _oldest_version(group: TrajectoryGroup) -> int | None:
    """Return the oldest version with which a trajectory of the group began, where it is known."""
    versions = (trajectory.initial_policy_version for trajectory in group.trajectories)
    return min((version for version in versions if version is not None), default=None)
