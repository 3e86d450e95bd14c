"""`[telemetry]`: traces."""

from __future__ import annotations

from typing import Literal

from pipeline.config.types import Section


class TelemetryConfig(Section, frozen=True, kw_only=True):
    """Traces. Where they go is said by the standard OTEL_EXPORTER_OTLP_* or by LANGFUSE_* variables."""

    enabled: Literal["auto", "on", "off"] = "auto"
    """`auto`: on where such a variable is set."""
    content: bool = True
    """Whether prompts and replies are part of the spans."""
