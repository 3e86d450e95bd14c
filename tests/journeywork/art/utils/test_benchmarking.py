"""Tables of what models logged."""

from __future__ import annotations

from pathlib import Path

import pytest

import journeywork.art as art
from journeywork.art.records import RunFolder
from journeywork.art.utils.benchmarking.filter_model_split import filter_rename_model_split
from journeywork.art.utils.benchmarking.load_trajectories import load_trajectories
from journeywork.art.utils.benchmarking.types import BenchmarkModelKey
from journeywork.art.utils.output_dirs import get_output_dir_from_model_properties

pytestmark = pytest.mark.anyio


def played(reward: float, task: int, **metrics: float) -> art.Trajectory:
    messages: art.MessagesAndChoices = [{"role": "user", "content": f"task {task}"}]
    return art.Trajectory(
        messages_and_choices=messages, reward=reward, metrics=dict(metrics), metadata={"task": task}
    )


async def test_logged_trajectories_are_a_table(tmp_path: Path) -> None:
    for model in ("a", "b", "c"):
        folder = RunFolder(Path(get_output_dir_from_model_properties("p", model, str(tmp_path))))
        groups = [art.TrajectoryGroup([played(0.5, 1, moves=3), played(1, 1)], metrics={"cost": 2.0})]
        folder.write_trajectories(groups, "val", 0)
        folder.write_trajectories([art.TrajectoryGroup([played(2, 2)])], "val", 10)
        folder.write_trajectories([art.TrajectoryGroup([played(3, 2)])], "train", 10)
    table = await load_trajectories("p", models=["a", "b"], art_path=str(tmp_path))
    assert table.height == 8
    keys = [BenchmarkModelKey("b", "the second"), BenchmarkModelKey("a", split="train")]
    chosen = filter_rename_model_split(table, keys)
    columns = ("model", "step", "reward", "metric_moves", "group_metric_cost", "metadata_task")
    assert chosen.select(columns).rows() == [
        ("the second", 0, 0.5, 3.0, 2.0, "1"),
        ("the second", 0, 1.0, None, 2.0, "1"),
        ("the second", 10, 2.0, None, None, "2"),
        ("a", 10, 3.0, None, None, "2"),
    ]
    assert chosen["group_number"].n_unique() == 3
    assert chosen["messages"][0].to_list() == [{"role": "user", "content": "task 1", "trainable": False}]
    assert (await load_trajectories("nobody", art_path=str(tmp_path))).is_empty()
