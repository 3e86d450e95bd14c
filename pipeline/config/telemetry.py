"""`[telemetry]`: traces."""

from __future__ import annotations

from typing import Literal

from pipeline.config.types import Section


class TelemetryConfig(Section, frozen=True, kw_only=True):
    """Traces. The standard OTEL_EXPORTER_OTLP_* or the LANGFUSE_* environment variables say where they are sent."""

    enabled: Literal["auto", "on", "off"] = "auto"
    """`auto`: on if such a variable is set."""
    content: bool = True
    """Whether spans hold prompts and replies."""
