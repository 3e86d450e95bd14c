"""Rollouts, training and evaluation at the same time."""

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import anyio
import pytest

import journeywork.art as art
from journeywork.art.pipeline_trainer import PipelineTrainer
from journeywork.art.types import TrainResult

pytestmark = pytest.mark.timeout(60)


class Backend:
    """Trains nothing, and remembers what it was given."""

    def __init__(self, step: int = 0) -> None:
        self.step, self.batches, self.options = step, [], []  # type: ignore[var-annotated]
        self.began, self.go_on = anyio.Event(), anyio.Event()
        self.go_on.set()

    async def register(self, model: Any) -> None:
        """Nothing."""

    async def get_step(self, model: Any) -> int:
        return self.step

    async def train(self, model: Any, groups: Iterable[Any], **options: Any) -> TrainResult:
        self.began.set()
        await self.go_on.wait()
        self.batches.append(list(groups))
        self.options.append(options)
        self.step += 1
        return TrainResult(self.step, {"loss": 0.5})

    async def log_validation(self, model: Any, groups: Iterable[Any]) -> None:
        """Nothing."""


async def model_of(backend: Backend, folder: Path) -> Any:
    model: Any = art.TrainableModel(name="m", project="p", base_model="b", base_path=str(folder))
    await model.register(backend)
    return model


async def group(model: Any, scenario: dict[str, Any], config: Any) -> art.TrajectoryGroup:
    rewards = scenario.get("rewards", (0.0, 1.0))
    await anyio.lowlevel.checkpoint()
    return art.TrajectoryGroup([art.Trajectory(reward=reward) for reward in rewards])


async def test_steps_are_trained_and_evaluated_and_the_next_trainer_goes_on(tmp_path: Path) -> None:
    backend, evaluated = Backend(), []
    model = await model_of(backend, tmp_path)

    async def evaluate(model: Any, step: int, config: Any) -> dict[str, list[art.Trajectory]]:
        evaluated.append((step, config))
        return {"val": [art.Trajectory(reward=1.0)]}

    async def scenarios() -> AsyncIterator[dict[str, Any]]:
        for number in range(20):
            yield {"metadata": {"scenario_id": number, "kind": "x"}}

    def trainer(**options: Any) -> PipelineTrainer[Any, Any]:
        return PipelineTrainer(
            model,
            backend,
            group,
            scenarios(),
            "config",
            evaluate,
            num_rollout_workers=1,
            min_batch_size=2,
            max_batch_size=2,
            max_steps_off_policy=1,
            eval_every_n_steps=2,
            learning_rate=1e-4,
            loss_fn="cispo",
            **options,
        )

    await trainer(max_steps=2).train()
    assert [len(batch) for batch in backend.batches] == [2, 2]
    assert backend.options[0] == {"learning_rate": 1e-4, "loss_fn": "cispo"}
    assert evaluated == [(0, "config"), (2, "config")]
    first = backend.batches[0][0]
    assert first.metadata == {"scenario_id": 0, "scenario_kind": "x"}
    assert first.trajectories[0].initial_policy_version == 0
    played = model.read_state()["_pipeline_trainer"]["scenario_offset"]
    assert 4 <= played < 20
    await trainer(eval_at_start=False).train()
    assert backend.batches[2][0].metadata["scenario_id"] == played
    assert sum(map(len, backend.batches)) == 4 + 20 - played, "it ends with the scenarios"


async def test_a_group_waits_for_the_version_of_the_step_before_it(tmp_path: Path) -> None:
    backend = Backend()
    backend.go_on = anyio.Event()
    model = await model_of(backend, tmp_path)
    trainer = PipelineTrainer(
        model,
        backend,
        group,
        ({} for _ in range(2)),
        None,
        num_rollout_workers=1,
        min_batch_size=1,
        max_batch_size=1,
        max_steps_off_policy=0,
    )
    async with anyio.create_task_group() as tg:
        tg.start_soon(trainer.train)
        await backend.began.wait()
        await anyio.wait_all_tasks_blocked()
        backend.go_on.set()
    assert [batch[0].trajectories[0].initial_policy_version for batch in backend.batches] == [0, 1]


async def test_what_can_not_be_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Backend(step=9)
    model = await model_of(backend, tmp_path)
    scenarios: list[dict[str, Any]] = [{"rewards": [1, 1]}, {}, {"rewards": [0]}, {"rewards": "no numbers"}, {}]

    async def failing(model: Any, scenario: Any, config: Any) -> art.TrajectoryGroup:
        return art.TrajectoryGroup([ValueError("no key")])

    def trainer(**options: Any) -> PipelineTrainer[Any, Any]:
        chosen = {"rollout_fn": group, "scenarios": scenarios, **options}
        return PipelineTrainer(model, backend, config=None, num_rollout_workers=1, **chosen)

    await trainer(min_batch_size=2).train()
    assert [len(batch) for batch in backend.batches] == [2]
    assert "a rollout failed; its scenario is left out" in caplog.text
    monkeypatch.setattr("journeywork.art.pipeline_trainer.trainer._MOST_EQUAL", 1)
    model.merge_state({"_pipeline_trainer": {"scenario_offset": 0}})
    await trainer(min_batch_size=1).train()
    assert "training ends: 1 groups" in caplog.text
    model.merge_state({"_pipeline_trainer": {"scenario_offset": 0}})
    with pytest.raises(RuntimeError, match=r"every rollout of a group failed, the first by .*ValueError.*: no key"):
        await trainer(rollout_fn=failing).train()
    for wrong in ({"min_batch_size": 0}, {"max_batch_size": 1}, {"max_steps": -1}):
        with pytest.raises(ValueError, match="must be at least"):
            trainer(**wrong)
