"""The documented views over the files: purpose, columns and SQL of each. `journeywork docs` makes a page of them.

Below the views lies one table per event tag with every column of the event, named as the tag with an
underscore for the dot (`rollout_exchange`). The views do not hide duplicates: the writer keeps an event from being
stored twice. `group` is a word of SQL, so the column is called `group_id`.

| module | what lives there |
| --- | --- |
| `view` | what a view is |
| `rollouts` | runs, calls, messages |
| `groups` | groups, verdicts, rewards, signals, people's labels, the cost of judging |
| `training` | checkpoints, delivery, lineage, staleness, steps, whether the training reward moved |
| `evaluations` | evaluations on held-out tasks; shadow calls: an apprentice beside an outside model |
| `spending` | what learning cost and gained, who waits for whom, what runs cost, what an apprentice is worth |
| `losses` | runs that wait, runs that never trained, dead letters, alarms |
"""

from store.reading.views.evaluations import EVALUATION_TASKS, EVALUATIONS, SHADOWS
from store.reading.views.groups import GROUPS, JUDGE_COST, LABELS, REWARDS, SIGNALS, VERDICTS
from store.reading.views.losses import ALARMS, DEAD, STARVATION, WAITING
from store.reading.views.rollouts import EXCHANGES, MESSAGES, TRAJECTORIES
from store.reading.views.spending import COSTS, SPENDING, TAKEOVERS, UTILIZATION
from store.reading.views.training import ADAPTERS, CHECKPOINTS, LINEAGE, PROGRESS, STALENESS, STEPS
from store.reading.views.view import View

VIEWS: tuple[View, ...] = (  # each after the views that it reads
    TRAJECTORIES,
    EXCHANGES,
    MESSAGES,
    GROUPS,
    VERDICTS,
    REWARDS,
    PROGRESS,
    SIGNALS,
    LABELS,
    CHECKPOINTS,
    ADAPTERS,
    LINEAGE,
    STALENESS,
    STEPS,
    EVALUATIONS,
    EVALUATION_TASKS,
    WAITING,
    STARVATION,
    JUDGE_COST,
    SHADOWS,
    SPENDING,
    UTILIZATION,
    COSTS,
    TAKEOVERS,
    DEAD,
    ALARMS,
)
