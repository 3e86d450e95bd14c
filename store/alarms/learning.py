"""The query of the alarm `not_learning`: the reasons for which a policy does not learn, the first of which is told.

A policy whose trajectories have the KL divergence K from those at the start can have another mean reward by at most
sqrt(K / 2) of the range of rewards (the inequality of Pinsker). Steps measure the divergence from the base model, so K
is taken as the largest change of that since the first step: it is the divergence from the start where training began at
the base, and an estimate of it after a warm start. The range is that of the rewards seen.

Outside models are left out: nothing trains them."""

# ruff: noqa: S608 - the only text put into SQL here is a constant of this module

from __future__ import annotations

from pipeline.events.types import REWARD_TOLERANCE

NUMBERED_STEPS = """WITH steps AS (
  SELECT project, model, step, metrics, row_number() OVER (PARTITION BY project, model ORDER BY step) AS from_first,
    row_number() OVER (PARTITION BY project, model ORDER BY step DESC) AS from_last
  FROM checkpoints WHERE branch = 'main'
)"""

NEWEST_GROUPS = """newest AS (
  SELECT * FROM groups WHERE status = 'scored' AND branch = 'main' AND split = 'train'
  QUALIFY row_number() OVER (PARTITION BY project, model ORDER BY stream_seq DESC) <= $groups
)"""

_UNREWARDED = """SELECT project, model, 1, 1.0, format('{} groups were discarded and none was scored; most often '
  'because {}. Report a reward when a run completes, name a judge model (`judge.model`), or compose rewards. If '
  'runs are alone in their groups, open several attempts at a task with one group id', groups, why)
FROM unrewarded"""

_LEAST_GROUPS = 6
"""Versions of fewer groups are not compared: the mean of so few depends more on the tasks than on the policy."""

_BACK = (
    "Serve a version from before (`journeywork policy promote`) and train it with a lower "
    "`trainer.optimizer.learning_rate`"
)

_PLUNGE = f"""versions AS (
  SELECT project, model, step, avg(reward) AS mean, var_samp(reward) / count(*) AS uncertain FROM (
    SELECT project, model, group_id, max(last_step) AS step, avg(reward) AS reward FROM rewards
    WHERE branch = 'main' AND split = 'train' AND outcome = 'scored' AND NOT offline AND isfinite(reward) GROUP BY ALL
  ) GROUP BY ALL HAVING count(*) >= {_LEAST_GROUPS}
), plunge AS (
  SELECT before.project, before.model, before.mean AS from_mean, newest.mean AS to_mean
  FROM versions before JOIN best USING (project, model) JOIN (
    FROM versions QUALIFY row_number() OVER (PARTITION BY project, model ORDER BY step DESC) = 1
  ) newest USING (project, model)
  WHERE before.step BETWEEN newest.step - $steps AND newest.step - 1
    AND before.mean - newest.mean > greatest(4 * sqrt(before.uncertain + newest.uncertain), span / 3)
  QUALIFY row_number() OVER (PARTITION BY before.project, before.model ORDER BY before.mean DESC) = 1
)"""
"""The reward of the newest version is far below that of one of the last steps. The entropy may stay as it was: a policy
that answers all alike can be unsure of what it says."""

_EQUAL = """SELECT project, model, 2, equal,
  format('{:.0f}% of the last {} groups have equal rewards, {:.3g} on average. ',
  100 * equal, groups, reward) || CASE
    WHEN entropy_left < 1 - $threshold THEN format('The policy collapsed into one answer: its entropy is {:.0f}% '
      'of that of the first steps. {}', 100 * entropy_left, $back)
    WHEN from_mean IS NOT NULL THEN format('The policy collapsed: the training reward fell from {:.3g} to {:.3g}. {}',
      from_mean, to_mean, $back)
    WHEN solved > 0.5 THEN 'Most of these tasks are solved: add harder tasks, or end the training'
    ELSE 'The attempts do not succeed or the reward does not tell them apart: begin with easier tasks, or use finer '
      'rewards' END
FROM scored LEFT JOIN policy USING (project, model) LEFT JOIN plunge USING (project, model) WHERE groups >= $groups"""

_STALE = """SELECT project, model, 3, stale, format('{:.0f}% of the last {} groups were too old to train; their newest '
  'version is step {}, the newest one is step {}. Follow it (`journeywork policy follow`) if a decision keeps '
  'agents on another version; else limit agents (`gateway.max_groups_ahead`)', 100 * stale, groups, played, newest)
FROM scored JOIN played USING (project, model) JOIN policy USING (project, model) WHERE groups >= $groups"""

_COLLAPSED = """SELECT project, model, 4, 1 - entropy_left,
  format('the policy collapsed into one answer: its entropy is {:.0f}% '
    'of that of the first steps{}. {}, or set `trainer.loss.entropy_coef`', 100 * entropy_left,
    coalesce(format(', and the training reward went from {:.3g} to {:.3g}', first_mean, last_mean), ''), $back)
FROM policy LEFT JOIN moved USING (project, model) WHERE steps >= 6 AND coalesce(gain < 2 * error, true)"""

_PLUNGED = """SELECT project, model, 4, 1.0,
  format('the policy collapsed: the training reward fell from {:.3g} to {:.3g} within a few steps. {}',
  from_mean, to_mean, $back)
FROM plunge"""

_TOO_NEAR = """SELECT project, model, 5, 1 - 5 * reach,
  format('the training reward went from {:.3g} to {:.3g} in {} steps, '
  'and the policy is still so near to its start that the reward can have changed by {:.2g} at most (KL). Raise '
  '`trainer.optimizer.learning_rate`: multiply it by 3 until KL grows', first_mean, last_mean, over, reach * span)
FROM policy JOIN moved USING (project, model) WHERE steps >= $steps AND gain < 2 * error"""

_NOT_PLAYED = """SELECT project, model, 6, 1.0,
  format('step {} is the newest, and the last {} groups were played with step {} '
  'at most: what is learned is not used. `journeywork policy follow` serves the newest; `logs/sampler.log` says why '
  'a version is not loaded', newest, groups, played)
FROM scored JOIN played USING (project, model) JOIN policy USING (project, model)
WHERE groups >= $groups AND played + $steps <= newest"""

_FELL = """SELECT project, model, 7, 1.0, format('the training reward fell from {:.3g} to {:.3g} in {} steps. {}',
  first_mean, last_mean, over, $back)
FROM moved WHERE over >= $steps AND gain < -4 * error"""

_NO_MORE_THAN_CHANCE = """SELECT project, model, 8, 1 - greatest(gain + 2 * error, 0) / best,
  format('the training reward went from {:.3g} '
  'to {:.3g} in {} steps, no more than chance. ', first_mean, last_mean, over) || CASE
    WHEN last_mean > $threshold * best THEN 'There is little left to learn: add harder tasks, or end the training'
    ELSE 'The policy changes, but not towards the reward: check that the reward tells good attempts from bad ones, '
      'and train more groups a step (`trainer.groups_per_step`)' END
FROM moved WHERE over >= 5 * $steps AND best > 0"""

_REASONS = _UNREWARDED, _EQUAL, _STALE, _COLLAPSED, _PLUNGED, _TOO_NEAR, _NOT_PLAYED, _FELL, _NO_MORE_THAN_CHANCE
_UNION = "\nUNION ALL\n"
_SQL = _UNION.join(_REASONS).replace("$back", f"'{_BACK}'")

NOT_LEARNING = f"""{NUMBERED_STEPS}, {NEWEST_GROUPS}, best AS (
  SELECT project, model, max(reward_max) AS best, max(reward_max) - min(reward_min) AS span
  FROM groups WHERE branch = 'main' AND split = 'train' GROUP BY ALL
), moved AS (
  SELECT project, model, last_mean - first_mean AS gain, last_mean, first_mean, last_step - first_step AS over,
    sqrt(greatest(first_variance / first_groups + last_variance / last_groups, 1e-9)) AS error,
    best, span
  FROM progress JOIN best USING (project, model) WHERE branch = 'main' AND least(first_groups, last_groups) >= 2
), {_PLUNGE}, policy AS (
  SELECT project, model, count(*) AS steps, max_by(step, step) AS newest,
    avg(metrics['entropy']) FILTER (from_last <= 3) / max(metrics['entropy']) FILTER (from_first <= 3) AS entropy_left,
    if(count(metrics['kl']) > 1, min_by(metrics['kl'], step) FILTER (metrics['kl'] IS NOT NULL), 0) AS first_kl,
    sqrt(greatest(max(metrics['kl']) FILTER (from_last <= $steps) - first_kl,
        first_kl - min(metrics['kl']) FILTER (from_last <= $steps))
      * sum(metrics['tokens']) / sum(metrics['trajectories']) / 2) AS reach
  FROM steps GROUP BY ALL
), scored AS (
  SELECT n.project, n.model, count(*) AS groups, avg((coalesce(reason, '') = 'no_variance')::INTEGER) AS equal,
    avg((coalesce(reason, '') = 'stale')::INTEGER) AS stale, avg(reward_mean) AS reward,
    avg((reward_mean >= best - {REWARD_TOLERANCE})::INTEGER) FILTER (reason = 'no_variance') AS solved
  FROM newest n JOIN best USING (project, model) GROUP BY ALL
), played AS (
  SELECT project, model, max(last_step) AS played FROM rewards SEMI JOIN newest USING (project, model, group_id)
  WHERE branch = 'main' GROUP BY ALL
), unrewarded AS (
  SELECT project, model, count(DISTINCT "group") AS groups, mode(split_part(detail, ':', 1)) AS why
  FROM group_discarded d
  WHERE "by" = 'judge' AND reason IN ('too_small', 'unscored') AND branch = 'main' AND split = 'train'
    AND "at" > $now - to_seconds($window_s)
    AND NOT EXISTS (FROM group_scored s WHERE s.project = d.project AND s.model = d.model AND s.branch = 'main'
      AND s.split = 'train' AND s."at" > $now - to_seconds($window_s))
  GROUP BY ALL HAVING count(DISTINCT "group") >= 3
), reasons(project, model, place, value, detail) AS (
{_SQL}
)
SELECT project, model, '' AS about, value, detail FROM reasons
WHERE value >= $threshold AND isfinite(value) AND NOT list_contains($outside::VARCHAR[], model)
QUALIFY row_number() OVER (PARTITION BY project, model ORDER BY place) = 1"""
