"""The leaders of the partitions, spread over the servers of a cluster.

A cluster chooses leaders by itself and does not spread them. Partition i asks for the i-th server, by name, to lead it.
A server that is offline or behind is not asked; a later call of `spread` asks it.
"""

from __future__ import annotations

import msgspec
import nats.errors
import nats.js.errors
from nats.js import api

from pipeline.backoff import Backoff
from pipeline.log import retry
from pipeline.log.stream_reader import StreamReader
from pipeline.telemetry.logs import get_logger

_log = get_logger("pipeline.log.leaders")

_ROUNDS = 8
"""How often the leaders of a new log are checked: a server that has just got its copy of a stream can't lead it yet."""


async def spread(log: StreamReader) -> bool:
    """Ask, for each partition that another server leads than the one it should, for a change of its leader. Returns
    whether every leader was in its place. A cluster that does not answer is left as it is."""
    placed = True
    for number, stream in enumerate(log.layout.prefixes):
        try:
            info = await log.js.stream_info(stream)
            wanted = _wanted(info, number)
            if wanted:
                await _change(log, stream, wanted)
            placed = placed and wanted == ""
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            _log.warning("a leader was not placed", stream=stream, error=retry.reason(error))
            placed = False
    return placed


async def spread_new(log: StreamReader) -> None:
    """`spread` until every leader is in its place, for some seconds at most."""
    backoff = Backoff()
    for _ in range(_ROUNDS):
        if await spread(log):
            return
        await backoff.wait()


def _wanted(info: api.StreamInfo, number: int) -> str | None:
    """Return the server that is to lead a stream: empty if it does; `None` if it can't now."""
    cluster = info.cluster
    if cluster is None or not cluster.leader or not cluster.replicas:
        return ""
    peers = sorted([cluster.leader, *(peer.name for peer in cluster.replicas if peer.name)])
    wanted = peers[number % len(peers)]
    if wanted == cluster.leader:
        return ""
    able = any(p.name == wanted and p.current and not p.offline for p in cluster.replicas)
    return wanted if able else None


async def _change(log: StreamReader, stream: str, server: str) -> None:
    request = msgspec.json.encode({"placement": {"preferred": server}})
    subject = f"$JS.API.STREAM.LEADER.STEPDOWN.{stream}"
    reply = await log.client.request(subject, request, timeout=log.config.ack_timeout_s)
    error = msgspec.json.decode(reply.data).get("error")
    if error is not None:
        raise nats.js.errors.APIError.from_error(error)
    _log.info("another server was asked to lead", stream=stream, server=server)
