"""Rewards of a judge model.

| module | contents |
| --- | --- |
| `ruler` | scores of a group's trajectories relative to each other |
| `judge_process` | the process that asks the judge |
"""

from journeywork.art.rewards.ruler import ruler, ruler_score_group

__all__ = ["ruler", "ruler_score_group"]
