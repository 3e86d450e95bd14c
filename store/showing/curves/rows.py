"""A checkpoint, or the evaluation of a policy version, as a row of figures."""

from __future__ import annotations

import msgspec

from pipeline.events import CheckpointPublished, PolicyEvaluated
from pipeline.log.messages import LogEntry
from pipeline.names import InvalidNameError, parse_version
from pipeline.statistics.metric_names import named, plain_name
from pipeline.telemetry.logs import get_logger

logger = get_logger("store.showing.curves.rows")

Key = tuple[str, str, int, str]
"""Model, branch, step, evaluation."""


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of `metrics.jsonl`."""

    model: str
    branch: str
    step: int
    version: str
    at: float
    """Time of the checkpoint or the evaluation, in seconds since the Unix epoch."""
    log_seq: int
    log_at: int
    """Where its event lies in stream POLICY: sequence, and time in microseconds."""
    metrics: dict[str, float | None]
    """The trainer's metrics as `trainer/<name>`, and those that ART has a name for under that name too; of an
    evaluation, its measures as `eval/<tasks>/<name>`. `null`: no number."""
    evaluation: str = ""
    """`<id>/<position>` of an evaluation and its entrant. Empty for a training step."""

    @property
    def key(self) -> Key:
        return (self.model, self.branch, self.step, self.evaluation)


def make_row(recorded: LogEntry[CheckpointPublished | PolicyEvaluated]) -> Row | None:
    """Return the row of an event; `None` for an evaluation of something that has no training step: a model of somebody
    else, or versions that changed while they were evaluated."""
    event, place = recorded.event, recorded.place
    if isinstance(event, CheckpointPublished):
        return Row(
            model=event.model,
            branch=event.branch,
            step=event.step,
            version=event.version,
            at=event.at / 1e6,
            log_seq=place.seq,
            log_at=place.at,
            metrics={**named(event.metrics)},
        )
    if event.kind != "policy" or not event.version:
        return None
    try:
        step = parse_version(event.version)[1]
    except InvalidNameError as error:
        logger.warning("evaluation without a curve", evaluation=event.evaluation, reason=str(error))
        return None
    return Row(
        model=event.model,
        branch="main",
        step=step,
        version=event.version,
        at=event.at / 1e6,
        log_seq=place.seq,
        log_at=place.at,
        metrics=_measured(event),
        evaluation=f"{event.evaluation}/{event.position}",
    )


def _measured(event: PolicyEvaluated) -> dict[str, float | None]:
    """Return an evaluation's measures, each with the ends of its interval, by the names of curves."""
    scenarios = plain_name(event.scenarios)
    tasks = f"eval/{scenarios}" if scenarios else "eval"
    metrics: dict[str, float | None] = {}
    for measure in event.measures:
        name = f"{tasks}/{measure.name}"
        metrics |= {name: measure.mean, f"{name}_low": measure.low, f"{name}_high": measure.high}
    return metrics | {f"{tasks}/failed_runs": float(event.failed), f"{tasks}/run_p50_s": event.run_p50_s}
