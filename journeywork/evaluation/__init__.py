"""Play held-out tasks with policy versions and outside models, compare them, and write reports.

    journeywork eval support@0 support gpt-5 --rollout my.agent:play --scenarios my.agent:held_out

| module | contents |
| --- | --- |
| `entrants` | who plays: names given on the command line |
| `playing` | every entrant plays the same tasks |
| `results` | means, paired differences, cost and latency of what was played |
| `loading` | rollouts as `module:function`, scenarios as `module:name` or JSONL |
| `report` | the report for a terminal |
| `command` | `journeywork eval` |
| `prompting` | `journeywork prompt`: a better system prompt, by GEPA |
"""

from journeywork.evaluation.playing import play
from journeywork.evaluation.report import text_report
from journeywork.evaluation.results import EntrantResult, EvaluationReport

__all__ = ["EntrantResult", "EvaluationReport", "play", "text_report"]
