"""Reads the records of all gateways, which list the versions that they use.

Each gateway renews a record on the log (`rollout_gateway.serving.fleet_records`). From these the controller of a server
knows which versions calls wait for, and when no call uses one any more, so that it can be unloaded."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pipeline import streams
from pipeline.log import key_value
from pipeline.log.stream_reader import StreamReader
from pipeline.streams import gateway_key
from pipeline.telemetry.logs import get_logger
from rollout_gateway.serving.fleet_records import GatewayRecord

logger = get_logger("rollout_gateway.sampler.gateway_records")


class GatewayRecords:
    """The latest record of each gateway of a project, kept up to date by `follow`."""

    def __init__(self, project: str) -> None:
        self._keys = gateway_key(project, "*")
        self._records: dict[str, GatewayRecord] = {}

    async def follow(self, log_reader: StreamReader, changed: Callable[[], None]) -> None:
        """Read the records and apply their changes. `changed` is called after each. Never returns."""
        async for key, value in key_value.follow(log_reader, streams.FLEET.name, self._keys):
            self.apply(key, value)
            changed()

    def apply(self, key: str, value: bytes) -> None:
        """Apply a gateway's record. An empty value means that the record was deleted or has expired."""
        self._records.pop(key, None)
        if not value:
            return
        try:
            self._records[key] = msgspec.json.decode(value, type=GatewayRecord)
        except msgspec.DecodeError as error:
            logger.error("record of a gateway ignored: it can't be decoded", key=key, error=str(error))

    def wanted_versions(self) -> list[str]:
        """Return the versions that calls wait for."""
        return list(dict.fromkeys(version for record in self._records.values() for version in record.wanted))

    def have_applied(self, seq: int) -> bool:
        """Return whether every gateway's record is from after the event of the stream POLICY with this sequence."""
        return all(record.policy_seq >= seq for record in self._records.values())

    def served_versions(self) -> set[str]:
        """Return the versions that model names resolved to when the gateways wrote their records. It may be others
        once they apply a later event, so ask `have_applied` first."""
        return {version for record in self._records.values() for version in record.serving}

    def in_use(self, replica: str, version: str) -> bool:
        """Return whether a call used the version at the replica when its gateway wrote its record."""
        return any(version in r.in_flight.get(replica, ()) for r in self._records.values())

    def is_released(self, replica: str, version: str, unloaded_seq: int) -> bool:
        """Return whether no call uses the version at the replica and no gateway will send one.

        `unloaded_seq`: sequence of the `policy.unloaded` event, which every gateway must have applied."""
        return self.have_applied(unloaded_seq) and not self.in_use(replica, version)
