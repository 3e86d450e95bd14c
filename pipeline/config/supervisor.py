"""`[supervisor]`: how `journeyman up` watches its processes."""

from __future__ import annotations

from pipeline.config.types import Positive, Section


class SupervisorConfig(Section, frozen=True, kw_only=True):
    """How `journeyman up` checks its processes."""

    deadline_s: Positive = 30.0
    """A process that was ready and then does not respond for this long is killed and started again. Services
    respond by a heartbeat of their event loop, vLLM by its health page, the log by acknowledging a write to each
    stream."""
    probe_every_s: Positive = 10.0
    """Time between two checks of the log, and of vLLM."""
