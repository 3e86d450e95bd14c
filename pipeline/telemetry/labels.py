"""Scores that people give in Langfuse become `group.labeled` events, each once.

A score that a person gives in the interface or in an annotation queue has the source ANNOTATION. Which of them the log
has already is read from the log, so a restart publishes none twice. A score that is changed is a further label.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import anyio
import msgspec

from pipeline.config import TelemetryConfig
from pipeline.errors import BrokerError
from pipeline.events import GroupLabeled, Label, TrajectoryOpened
from pipeline.log.broker import Broker
from pipeline.telemetry.langfuse import Langfuse, LangfuseError, ReadScore
from pipeline.telemetry.logs import get_logger

log = get_logger("pipeline.telemetry.labels")

SOURCE = "langfuse"
_COMMENT_CHARS = 4096


async def value_of(score: ReadScore, langfuse: Langfuse) -> float | None:
    """Return a score as a number from 0 to 1; None if it can't be one.

    A boolean is 0 or 1. A number, and the number of a category, is scaled by the range that the score's configuration
    has in Langfuse; without a range it must lie between 0 and 1."""
    value = score.value
    if isinstance(value, bool) or score.data_type == "BOOLEAN":
        return float(value or 0) if isinstance(value, bool | float | int) else None
    low, high = 0.0, 1.0
    if score.config_id:
        config = await langfuse.score_config(score.config_id)
        numbers = [c.value for c in config.categories or ()]
        if isinstance(value, str):
            value = next((c.value for c in config.categories or () if c.label == value), None)
            low, high = (min(numbers), max(numbers)) if numbers else (0.0, 0.0)
        elif config.min_value is not None and config.max_value is not None:
            low, high = config.min_value, config.max_value
    if value is None or isinstance(value, str) or high <= low or not low <= value <= high:
        return None
    return (value - low) / (high - low)


class LabelReader:
    """Reads people's scores and publishes those that the log does not have."""

    def __init__(self, broker: Broker, langfuse: Langfuse, project: str, config: TelemetryConfig) -> None:
        self._broker, self._langfuse, self._project, self._config = broker, langfuse, project, config
        self._known: dict[str, tuple[float, str]] = {}
        """Score id to value and comment, of the newest label on the log."""
        self._refused: set[str] = set()
        """Scores that were reported as unusable."""

    async def run(self) -> None:
        """Read every `telemetry.labels_every_s`. Does not return."""
        while True:
            try:
                await self.read()
            except (LangfuseError, BrokerError, msgspec.MsgspecError) as error:
                log.warning("labels were not read from Langfuse; trying again", error=str(error))
            await anyio.sleep(self._config.labels_every_s)

    async def read(self) -> int:
        """Publish what is new. Returns the number of events. Raises `LangfuseError`, `BrokerError`."""
        since = datetime.now(UTC) - timedelta(days=self._config.labels_days)
        published = 0
        names = self._config.label_names
        async for score in self._langfuse.human_scores(since):
            if not names or score.name in names:
                published += await self._take(score)
        return published

    async def _take(self, score: ReadScore) -> int:
        if not score.trace:
            return self._refuse(score, "it is about a session or an experiment, not about a trace")
        value = await value_of(score, self._langfuse)
        if value is None:
            return self._refuse(
                score, "it has no value from 0 to 1: give its configuration a range or categories"
            )
        comment = (score.comment or "")[:_COMMENT_CHARS]
        if self._known.get(score.id) == (value, comment):
            return 0
        trajectory = await self._langfuse.trajectory_of(score.trace)
        if not trajectory:
            return 0  # its run is not complete, or the trace is of another program
        opened = await self._broker.read_last(TrajectoryOpened, project=self._project, trajectory=trajectory)
        if opened is None:
            return self._refuse(score, "its trajectory is not on this log")
        return await self._label(
            score, opened.event, Label(trajectory=trajectory, score=value, comment=comment)
        )

    async def _label(self, score: ReadScore, opened: TrajectoryOpened, label: Label) -> int:
        own = f"{SOURCE}/{score.id}/"
        before = await self._broker.read(GroupLabeled, project=self._project, group=opened.group)
        earlier = [r.event for r in before if r.event.source == SOURCE and r.event.request.startswith(own)]
        said = (label.score, label.comment)
        if earlier and (earlier[-1].labels[0].score, earlier[-1].labels[0].comment) == said:
            self._known[score.id] = said
            return 0
        await self._broker.publish(
            GroupLabeled(
                project=self._project, group=opened.group, model=opened.model, labels=(label,),
                by=score.author_user_id or SOURCE, source=SOURCE, request=f"{own}{len(earlier)}",
            )
        )  # fmt: skip
        self._known[score.id] = said
        return 1

    def _refuse(self, score: ReadScore, why: str) -> int:
        if score.id not in self._refused:
            self._refused.add(score.id)
            log.warning("a score in Langfuse is no label", score=score.id, name=score.name, reason=why)
        return 0
