"""The record of an inference server on the log. Gateways send calls to the servers that have one.

The controller of a server sets the record when the server holds all wanted adapters, and removes it when the server
does not answer. It expires by itself, so a server whose agent died gets no calls either."""

from __future__ import annotations

import anyio
import msgspec

from pipeline import streams
from pipeline.config import Config
from pipeline.log import key_value
from pipeline.log.broker import Broker, BrokerError
from pipeline.streams import sampler_key
from pipeline.telemetry.logs import get_logger
from rollout_gateway.serving.fleet_records import SamplerRecord

logger = get_logger("rollout_gateway.sampler.registration")


class Registration:
    """Writes, renews and removes the record of one server."""

    def __init__(self, broker: Broker, config: Config, name: str) -> None:
        """`name`: of the server."""
        self._broker, self._name, self._ttl_s = broker, name, config.sampler.ttl_s
        self._key = sampler_key(config.project, name)
        self._record: SamplerRecord | None = None
        """The record on the log; `None` if the server is not registered."""
        self._writing = anyio.Lock()

    async def set(self, record: SamplerRecord) -> None:
        """Write the server's record if it has changed. Raises `BrokerError`."""
        if record == self._record:
            return
        if self._record is None:
            logger.info("inference server registered", replica=self._name, server_start=record.server_start)
        self._record = record
        await self._write()

    async def renew(self) -> None:
        """Write the record again before it expires. Runs by itself, because loading an adapter may take longer. Never
        returns."""
        while True:
            await anyio.sleep(self._ttl_s / 4)
            try:
                await self._write()
            except BrokerError as error:
                logger.warning("the server's record was not renewed", replica=self._name, error=str(error))

    async def remove(self) -> None:
        """Remove the server's record."""
        if self._record is None:
            return
        self._record = None
        async with self._writing:
            try:
                await key_value.delete(self._broker, streams.FLEET.name, self._key)
            except BrokerError as error:
                logger.warning("the server's record stays until it expires", replica=self._name, error=str(error))

    async def _write(self) -> None:
        """Write the record, unless it was removed meanwhile. Raises `BrokerError`."""
        async with self._writing:  # one write at a time, so that the last one on the log is the newest
            if self._record is not None:
                value = msgspec.json.encode(self._record)
                await key_value.put(self._broker, streams.FLEET.name, self._key, value, self._ttl_s)
