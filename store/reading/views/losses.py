"""Views of what was not used, yet or ever: runs that wait, runs that never trained, events that no consumer used; and
of alarms."""

from __future__ import annotations

from pipeline.events import AlarmChanged, DeadLettered, GroupDiscarded
from store.reading.views.view import View

WAITING = View(
    "waiting",
    "Runs that ended and wait to be scored: for feedback (`feedback.wait_s`), for the other runs of their group, or "
    "for the judge. One row per run.",
    {
        "group_id": "Its group; a run without one is a group with the run's id.",
        "reward": "Reward that the agent reported; null if none.",
    },
    """
        WITH ended AS (
          SELECT project, model, coalesce(nullif("group", ''), trajectory) AS group_id, trajectory, task,
            coalesce(split, 'train') AS split, reward, "at" AS completed_at
          FROM rollout_completed WHERE outcome <> 'no_result'
        ), decided AS (
          SELECT project, model, "group" AS group_id, split FROM group_scored WHERE branch = 'main'
          UNION ALL
          SELECT project, model, "group" AS group_id, split FROM group_discarded WHERE branch = 'main'
        )
        SELECT project, model, group_id, trajectory, task, split, reward, completed_at
        FROM ended ANTI JOIN decided USING (project, model, group_id, split)
        """,
)

STARVATION = View(
    "starvation",
    "Runs that never trained, with the reason, by duration. It shows whether long tasks starve.",
    {
        "reason": "Reason of the discard, or the outcome that is not trained (`no_result`, `masked`).",
        "dropped_by": "Service that discarded the group; `agent` for an outcome.",
        "duration_s": "Duration of the run; if unknown, that of the longest run of its group.",
        "duration": "Range of `duration_s`: `<1s`, `<10s`, `<1m`, `<10m`, `<1h`, `>=1h`.",
    },
    """
        WITH dropped AS (
          SELECT d.project, d.model, d."group" AS group_id, d.branch, unnest(d.trajectories) AS trajectory, d.reason,
            d."by" AS dropped_by, d.detail, d.version, d.duration_s AS longest_s, d.at AS dropped_at
          FROM group_discarded d
        ), timed AS (
          SELECT d.* EXCLUDE (longest_s), coalesce(t.duration_s, nullif(d.longest_s, 0)) AS duration_s
          FROM dropped d LEFT JOIN trajectories t ON t.project = d.project AND t.trajectory = d.trajectory
          UNION ALL BY NAME
          SELECT project, model, group_id, 'main' AS branch, trajectory, outcome AS reason, 'agent' AS dropped_by,
            '' AS detail, '' AS version, completed_at AS dropped_at, duration_s
          FROM trajectories WHERE outcome IN ('no_result', 'masked')
        )
        SELECT project, model, group_id, branch, trajectory, reason, dropped_by, detail, version, duration_s,
          CASE WHEN duration_s < 1 THEN '<1s' WHEN duration_s < 10 THEN '<10s' WHEN duration_s < 60 THEN '<1m'
            WHEN duration_s < 600 THEN '<10m' WHEN duration_s < 3600 THEN '<1h' WHEN duration_s >= 3600 THEN '>=1h'
          END AS duration, dropped_at
        FROM timed
        """,
    sources=(GroupDiscarded,),
)

DEAD = View(
    "dead",
    "Events that no consumer could use, with the reason.",
    {
        "dead_seq": "Sequence in DEAD, which `journeywork dead` takes.",
        "subject": "Subject of the event in that stream.",
        "reason": "`undecodable`, `unstorable`, `max_deliver`, `ended_service`, …",
    },
    """
        SELECT log_seq AS dead_seq, stream, stream_seq, original_subject AS subject, consumer, reason, detail,
          deliveries, payload, headers, "at" AS dead_at
        FROM dead_letter
        """,
    sources=(DeadLettered,),
)


ALARMS = View(
    "alarms",
    "One row per alarm that began. `journeywork docs` says what each means.",
    {"cleared_at": "When it ended, UTC; null while it holds."},
    """
        SELECT project, model, alarm, about, arg_max(value, log_seq) AS value, arg_max(threshold, log_seq) AS threshold,
          arg_max(detail, log_seq) AS detail, since, max("at") FILTER (state = 'cleared') AS cleared_at
        FROM policy_alarm GROUP BY project, model, alarm, about, since
        """,
    sources=(AlarmChanged,),
)

VIEWS = (WAITING, STARVATION, DEAD, ALARMS)
