"""`[supervisor]`: how `journeyman up` watches its processes."""

from __future__ import annotations

from pipeline.config.types import Positive, Section


class SupervisorConfig(Section, frozen=True, kw_only=True):
    """How `journeyman up` watches what it started."""

    deadline_s: Positive = 30.0
    """A process that is ready and then gives no sign of life for so long is killed and started again. A sign of life is a
    heartbeat of a service's event loop, vLLM's health page, and a write that each stream of the log acknowledges."""
    probe_every_s: Positive = 10.0
    """Between two probes of the log, and of vLLM."""
