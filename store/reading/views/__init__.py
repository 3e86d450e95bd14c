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

from store.reading.views import evaluations, groups, losses, rollouts, spending, training
from store.reading.views.view import View

_MODULES = (rollouts, groups, training, evaluations, spending, losses)
VIEWS: tuple[View, ...] = tuple(view for module in _MODULES for view in module.VIEWS)
"""Each after the views that it reads."""
