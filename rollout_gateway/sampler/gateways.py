"""The records of all gateways: which versions they use."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pipeline import streams
from pipeline.log import key_value
from pipeline.log.stream_reader import StreamReader
from pipeline.telemetry.logs import get_logger
from rollout_gateway.serving.fleet_records import GatewayRecord, gateway_key

log = get_logger("rollout_gateway.sampler.gateways")

_decode = msgspec.json.Decoder(GatewayRecord).decode


class Gateways:
    """The latest record of each gateway of a project, kept up to date by `follow`."""

    def __init__(self, project: str) -> None:
        self._keys = gateway_key(project, "*")
        self._records: dict[str, GatewayRecord] = {}

    async def follow(self, log_reader: StreamReader, changed: Callable[[], None]) -> None:
        """Read the records and follow their changes; call `changed` after each. Never returns."""
        async for key, value in key_value.follow(log_reader, streams.FLEET.name, self._keys):
            self.apply(key, value)
            changed()

    def apply(self, key: str, value: bytes) -> None:
        """Apply a gateway's record. An empty one means that the gateway has gone."""
        self._records.pop(key, None)
        if not value:
            return
        try:
            self._records[key] = _decode(value)
        except msgspec.DecodeError as error:
            log.error("record of a gateway ignored", key=key, error=str(error))

    def wanted(self) -> list[str]:
        """Return the versions that calls wait for."""
        return list(dict.fromkeys(version for record in self._records.values() for version in record.wanted))

    def age(self, version: str) -> int:
        """Return how many versions a gateway has used since it used this one: the least of all gateways. Large if none
        used it lately."""
        ranks = (r.recent.index(version) for r in self._records.values() if version in r.recent)
        return min(ranks, default=1_000_000)

    def using(self, replica: str, version: str) -> bool:
        """Return whether a call uses the version at the replica."""
        return any(version in r.in_flight.get(replica, ()) for r in self._records.values())

    def released(self, replica: str, version: str, unloaded_seq: int) -> bool:
        """Return whether no call uses the version at the replica and none will.

        `unloaded_seq`: sequence of the `policy.unloaded` event, which every gateway must have applied."""
        known = all(record.policy_seq >= unloaded_seq for record in self._records.values())
        return known and not self.using(replica, version)
