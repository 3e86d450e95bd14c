"""The alarms: the query of each, its threshold setting, and the action to take. `journeywork docs` makes a page
of them.

A query returns one row (`project`, `model`, `about`, `value`, `detail`) for each model, server, consumer or stream that
meets the condition. Its parameters are `$threshold` (the alarm's setting), `$now`, `$outside` (the names of outside
models), and `$steps`, `$groups` and `$window_s` of `[alarms]`. The tables `fills`, `unwritten`, `damaged` and
`replicas` hold measurements of the checking process.
"""

# ruff: noqa: S608 - the only text put into SQL here is a constant of this module

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from pipeline.config import Config
from store.alarms.learning import NOT_LEARNING, NUMBERED_STEPS


@dataclass(frozen=True)
class Alarm:
    """A condition of a run that is reported to an operator."""

    name: str
    title: str
    meaning: str
    """Explanation of the problem."""
    setting: str
    """Dotted name of the setting that `$threshold` stands for."""
    sql: str
    action: str
    """The action to take."""


ALARMS: tuple[Alarm, ...] = (
    Alarm(
        "log_full",
        "Log or disk near its limit",
        "A stream or bucket of the log is close to its byte limit, or the disk of the run directory is nearly full. "
        "At the limit the log accepts no events, and model calls fail.",
        "alarms.full_share",
        """SELECT '' AS project, '' AS model, name AS about, bytes / "limit" AS value,
  format('{} is {:.0f}% full ({:.1f} of {:.1f} GB)', name, 100 * value, bytes / 1e9, "limit" / 1e9) AS detail
FROM fills WHERE bytes / "limit" >= CASE kind WHEN 'disk' THEN (1 + $threshold) / 2 ELSE $threshold END""",
        "For a stream: raise `nats.max_bytes`, check whether the store is behind (`journeywork status`), or shorten "
        "the retention. For the disk: free space, move `store.dir` to object storage, or set `store.keep_days`.",
    ),
    Alarm(
        "dead_letters",
        "Dead letters",
        "A consumer could not process some events and skipped them.",
        "alarms.dead_letters",
        """SELECT '' AS project, '' AS model, consumer AS about, count(*) AS value,
  format('{} dead letters of consumer {} ({})', count(*), consumer, string_agg(DISTINCT reason, ', ' ORDER BY reason))
    AS detail
FROM dead WHERE dead_at > $now - to_seconds($window_s) GROUP BY consumer HAVING count(*) > $threshold""",
        "`journeywork dead list` and `journeywork dead show` give the reason. Correct the cause, then `journeywork "
        "dead retry` or `journeywork dead drop`. The alarm ends when the letters are older than `alarms.window_s`.",
    ),
    Alarm(
        "replica_behind",
        "Replica behind",
        "An inference server has not loaded the newest version. Calls for it go to the other servers. If too few hold "
        "it (`gateway.replicas.serving_share`), trajectories are sampled from an older policy. A server that "
        "starts has `vllm.start_timeout_s`, from the start of the store or from when its sampler agent lost it.",
        "alarms.behind_s",
        """WITH newest AS (
  SELECT project, model, max(step) AS step FROM checkpoints
  WHERE branch = 'main' AND published_at < $now - to_seconds($threshold) GROUP BY ALL
), held AS (
  SELECT project, model, replica, max(step) AS step
  FROM (  -- a process of the server lost what an earlier one had loaded
    FROM adapters WHERE replica IS NOT NULL
    QUALIFY server_start = arg_max(server_start, loaded_at) OVER (PARTITION BY project, replica)
  ) GROUP BY ALL
)
SELECT n.project, n.model, r.replica AS about, n.step - coalesce(h.step, 0) AS value,
  format('{} serves {}@{} at most; {}@{} was published', r.replica, n.model, coalesce(h.step, 0), n.model, n.step)
    AS detail
FROM newest n CROSS JOIN replicas r LEFT JOIN held h USING (project, model, replica)
WHERE n.step > coalesce(h.step, 0)""",
        "Read the sampler agent's log (`logs/sampler.log`): the server is down, or it refused the adapter (rank, "
        "`vllm.max_loras`, no effect on logprobs). `GET /v1/policies` names refused versions with the reason.",
    ),
    Alarm(
        "judge_failing",
        "Judge fails",
        "Most passes of the judge model gave no scores: its calls fail, or its replies can't be read. Groups wait, "
        "and are discarded after `judge.retry_for_s`.",
        "alarms.judge_failed_share",
        """SELECT project, '' AS model, ruler AS about, sum(recent_failed) / sum(recent_passes) AS value,
  format('{} of {} passes gave no scores; the last one: {}', sum(recent_failed)::BIGINT, sum(recent_passes)::BIGINT,
    arg_max(failure, "at") FILTER (recent_failed > 0)) AS detail
FROM group_measured WHERE kind = 'groups' AND "at" > $now - INTERVAL 10 MINUTE
GROUP BY ALL HAVING sum(recent_failed) >= 2 AND value >= $threshold""",
        "`logs/judge.log` has the replies and errors. Failed calls: check `judge.model`, `judge.api_base`, the key "
        "and the provider's limits. Unreadable: take a model that writes JSON. "
        "Token limit: raise `judge.request.max_tokens`. Context: lower `judge.context_tokens`.",
    ),
    Alarm(
        "not_learning",
        "Does not learn",
        "The training reward has not risen, and the likely reason is known; or groups no longer train. The detail "
        "gives the reason: no rewards, equal rewards, a collapse into one answer, groups that are too old, a policy "
        "too near to the one at the start to differ (learning rate), a version that agents do not play, a reward that "
        "falls.",
        "alarms.not_learning",
        NOT_LEARNING,
        'More is in docs/troubleshooting.md under "It trains and does not get better".',
    ),
    Alarm(
        "judge_drift",
        "Judge drift",
        "The judge no longer orders the anchor groups as their known rewards do.",
        "judge.anchors.min_tau",
        """SELECT project, '' AS model, ruler AS about, kendall_tau AS value,
  coalesce(format('Kendall tau of the judge with the anchors is {:.2f}', kendall_tau), 'no anchor could be judged')
    AS detail
FROM group_measured WHERE kind = 'anchors'
QUALIFY row_number() OVER (PARTITION BY project, ruler ORDER BY "at" DESC, log_seq DESC) = 1
  AND (alarm OR kendall_tau IS NULL OR kendall_tau < $threshold)""",
        "Find the anchors that it ranks wrongly (`journeywork judge eval`). If the provider changed the model, name "
        "an exact version in `judge.model`. Until it agrees again, stop the judge: groups wait on the log.",
    ),
    Alarm(
        "sampler_mismatch",
        "Sampler mismatch",
        "The inference server's logprobs differ from those that the trainer computes for the same tokens and version, "
        "or the trainer refused a step for this reason. The importance ratios are wrong.",
        "alarms.logprob_diff",
        f"""{NUMBERED_STEPS}
SELECT project, model, '' AS about,
  max(greatest(metrics['sampler_logprob_diff'], metrics['on_policy_logprob_diff'])) AS value,
  format('the logprobs of sampler and trainer differ by {{:.3g}} nats', value) AS detail
FROM steps WHERE from_last <= $steps GROUP BY ALL HAVING value > $threshold
UNION ALL
SELECT '', '', consumer, count(*), format('the trainer refused to train {{}} groups', count(*))
FROM dead WHERE reason = 'sampler_mismatch' AND dead_at > $now - to_seconds($window_s) GROUP BY consumer""",
        "Check that vLLM runs with `--logprobs-mode processed_logprobs`, with the base model and the dtype of the "
        "trainer, and without a quantisation that the trainer does not use. `journeywork check-model` checks whether "
        "the trainer computes the model correctly.",
    ),
    *(
        Alarm(
            f"over_{name}_budget",
            f"Budget of {what} used up",
            f"Learning has reached the limit `budget.{setting}`. The judge discards groups as `over_budget`, except "
            "`budget.keep_share` of them; calls are answered as before.",
            f"budget.{setting}",
            f"""SELECT project, '' AS model, '' AS about, sum({spent})::DOUBLE AS value,
  format('{{:.6g}} of {{:.6g}} {unit} are spent (budget.{setting})', value, $threshold) AS detail
FROM spending WHERE $threshold > 0 GROUP BY project HAVING value >= $threshold""",
            "`SELECT * FROM spending` shows the cost and the gain of each step. Set a higher "
            f"`budget.{setting}` and start the services again, or leave the policy as it is.",
        )
        for name, setting, what, unit, spent in (
            ("judge", "judge_usd", "judging", "USD", "judge_usd"),
            ("gpu", "gpu_hours", "GPU time", "GPU hours", "(train_gpu_s + serve_gpu_s) / 3600"),
            ("token", "sampled_tokens", "sampled tokens", "tokens", "sampled_tokens"),
        )
    ),
    Alarm(
        "kl_rise",
        "Rise of KL",
        "The policy went far from where its training began. It may exploit the reward function instead of solving the "
        "task.",
        "alarms.kl",
        f"""{NUMBERED_STEPS}
SELECT project, model, '' AS about, avg(metrics['kl']) FILTER (from_last <= $steps)
    - if(count(metrics['kl']) > 1, min_by(metrics['kl'], step) FILTER (metrics['kl'] IS NOT NULL), 0) AS value,
  format('the KL divergence from the base model rose by {{:.3g}} nats per token since training began', value) AS detail
FROM steps GROUP BY ALL HAVING count(*) >= $steps AND value > $threshold""",
        "Read some of the best runs on the dashboard. If they exploit the reward, correct it and promote an "
        "older version. Otherwise set `trainer.loss.beta`, lower the learning rate, or raise the threshold.",
    ),
    Alarm(
        "store_behind",
        "Store behind",
        "The store has not written events that the log will delete soon, or the log has deleted events that no store "
        "had written. Deleted events are missing in the history.",
        "alarms.unwritten_share",
        """SELECT '' AS project, '' AS model, consumer AS about, max(share) AS value,
  string_agg(detail, '; ' ORDER BY share DESC) AS detail
FROM unwritten WHERE share >= $threshold GROUP BY consumer ORDER BY consumer""",
        "Find out why the stores are slow (`logs/store.log`), and start another one with the same `store.dir`. Until "
        "they have caught up, raise `nats.rollouts_max_age_h`. An alarm about deleted events ends when the stores "
        "restart.",
    ),
    Alarm(
        "file_damaged",
        "File of the history damaged",
        "A file of the store can't be read. Queries of its table fail, and the table's small files are not merged. New "
        "events are written as before.",
        "alarms.damaged_files",
        """SELECT '' AS project, '' AS model, path AS about, 1 + $threshold AS value,
  format('{} can''t be read', path) AS detail
FROM damaged WHERE (SELECT count(*) FROM damaged) > $threshold ORDER BY path""",
        "Restore the file from a backup, or remove it from its table as docs/store.md says under Faults. Then check "
        "the disk.",
    ),
)
"""Causes before their consequences: the first one that is raised says what to do first."""


def threshold(config: Config, alarm: Alarm) -> float:
    """Return the value of the setting `alarm.setting`, with which the alarm's query compares."""
    return float(attrgetter(alarm.setting)(config))
