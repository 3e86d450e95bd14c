"""The event of an alarm, in stream POLICY, where the decisions are that an operator takes after it."""

from __future__ import annotations

from typing import Literal

from pipeline.events.base import Event
from pipeline.events.types import Micros


class AlarmChanged(Event, frozen=True, kw_only=True, tag="policy.alarm"):
    """An alarm about the run began or ended."""

    subject_fields = ("project", "alarm")
    message_id_format = "{0.project}/{0.alarm}/{0.model}/{0.about}/{0.since}/{0.state}"

    alarm: str
    """Name of the alarm, as in `store.alarms.table`."""
    state: Literal["raised", "cleared"]
    model: str = ""
    """Policy that it is about. Empty: the whole run."""
    about: str = ""
    """What it is about beside the model, such as a replica, a stream or a consumer."""
    value: float = 0.0
    """The measured value when the alarm was raised, or when its condition last held. NaN: there was none."""
    threshold: float = 0.0
    """The setting that it was compared with."""
    detail: str = ""
    """The alarm in words."""
    action: str = ""
    """What to do."""
    since: Micros = 0
    """When it was raised."""
