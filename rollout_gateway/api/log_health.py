"""Whether the log takes writes. `/health` tells it, so that a load balancer can send calls to another gateway."""

from __future__ import annotations

import anyio

from pipeline.log import health
from pipeline.log.broker import Broker
from pipeline.telemetry.logs import get_logger
from rollout_gateway.capture.run_log import STREAM

logger = get_logger("rollout_gateway.api.log_health")

PROBE_EVERY_S = 5.0
"""Seconds between two probes."""


class LogHealth:
    """Probes the log."""

    trouble = ""
    """Why the log takes no writes; empty while it takes them."""

    async def run(self, broker: Broker) -> None:
        """Probe every 5 seconds. Never returns."""
        while True:
            refusal = await health.probe(broker, STREAM, broker.config.ack_timeout_s)
            trouble = refusal.reason if refusal is not None else ""
            if trouble and not self.trouble:
                logger.error("the log takes no writes: captured calls are answered 503", reason=trouble)
            elif self.trouble and not trouble:
                logger.info("the log takes writes again")
            self.trouble = trouble
            await anyio.sleep(PROBE_EVERY_S)
