"""Rollouts, training and evaluation at the same time, as in ART.

| module | contents |
| --- | --- |
| `trainer` | `PipelineTrainer` |
"""

from journeywork.art.pipeline_trainer.trainer import PipelineTrainer

__all__ = ["PipelineTrainer"]
