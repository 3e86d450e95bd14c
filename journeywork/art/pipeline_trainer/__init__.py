"""Rollouts, training and evaluation at the same time, as in ART.

| module | contents |
| --- | --- |
| `trainer` | `PipelineTrainer` |
"""

from journeywork.art.pipeline_trainer.trainer import (
    EvalFn,
    PipelineTrainer,
    RolloutFn,
    ScenarioT,
    SingleRolloutFn,
    make_group_rollout_fn,
)
from journeywork.art.refused import refusing

__getattr__ = refusing(__name__)
__all__ = ["EvalFn", "PipelineTrainer", "RolloutFn", "ScenarioT", "SingleRolloutFn", "make_group_rollout_fn"]
