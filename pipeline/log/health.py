"""Whether the log takes writes, and how full it is. Supervisor, gateways, stores and `journeywork status` ask.

A frozen stream still answers reads, so the probe is a write: after a full disk a stream answers every request and
accepts no message until its server restarts. The message of a probe lives for `PROBE_TTL_S` on `alive.<stream>`, which
no consumer reads.
"""

from __future__ import annotations

import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import nats.errors
import nats.js.errors

from pipeline import streams
from pipeline.errors import BrokerError
from pipeline.log.broker import Broker
from pipeline.log.retry import reason

PROBE_TTL_S = 60
_LIMIT_REACHED = frozenset({10047, 10054, 10077, 10120})
"""JetStream's error codes for a limit that is reached. The server works, and a restart does not help."""


@dataclass(frozen=True)
class Refusal:
    """Why a stream did not take a write."""

    kind: Literal["missing", "at_limit", "refused", "silent"]
    """`silent`: the server did not answer, or has no leader for the stream."""
    reason: str


async def probe(broker: Broker, stream: str, timeout_s: float) -> Refusal | None:
    """Write to a stream. Return why it did not take the write, or `None` if it did."""
    headers = {"Nats-TTL": f"{PROBE_TTL_S}s"}
    try:
        await broker.js.publish(streams.alive_subject(stream), b"", timeout=timeout_s, headers=headers)
    except nats.js.errors.NoStreamResponseError:
        return Refusal("missing", await broker.why_no_answer(stream))
    except nats.js.errors.APIError as error:
        if error.err_code in _LIMIT_REACHED:
            return Refusal("at_limit", f"{stream} takes no events ({error.description}): raise nats.max_bytes")
        return Refusal("silent" if error.code == 503 else "refused", f"{stream}: {error.description}")
    except (nats.errors.Error, TimeoutError) as error:
        return Refusal("silent", f"{stream} did not take a write: {reason(error)}")
    return None


@dataclass(frozen=True)
class Fill:
    """How full a stream, a bucket (which is a stream, too) or a disk is."""

    name: str
    kind: Literal["stream", "disk"]
    bytes: int
    limit: int
    """0: no limit."""

    @property
    def share(self) -> float:
        """The part of its limit that is filled; 0 without a limit."""
        return self.bytes / self.limit if self.limit else 0.0


async def fills(broker: Broker) -> list[Fill]:
    """Return the size of every stream and bucket that exists. Raises `BrokerError` if the server does not answer."""
    out = []
    names = [spec.name for spec in streams.STREAMS]
    names += [streams.bucket_stream(bucket.name) for bucket in streams.buckets()]
    for name in names:
        try:
            info = await broker.js.stream_info(name)
        except nats.js.errors.NotFoundError:
            continue
        except (nats.errors.Error, TimeoutError) as error:
            raise BrokerError(f"{name} was not described: {reason(error)}") from error
        out.append(Fill(name, "stream", info.state.bytes, max(0, info.config.max_bytes or 0)))
    return out


def disk_fill(folder: Path) -> Fill:
    """Return how full the disk is that holds `folder`."""
    disk = shutil.disk_usage(folder)
    name = f"the disk under {folder} on {socket.gethostname()}"
    return Fill(name, "disk", disk.total - disk.free, disk.total)
