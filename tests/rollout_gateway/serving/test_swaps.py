"""What `benchmarks.swaps` measures at length, as a test: no stream fails or blocks, every exchange tells the truth, and
no call is answered by an older version than a call that had ended when it began."""

from __future__ import annotations

import pytest

from benchmarks import swaps
from pipeline.log.broker import Broker
from tests.rollout_gateway.conftest import StartGateway
from tests.rollout_gateway.kit import exchanges, older_than_before

pytestmark = [pytest.mark.anyio, pytest.mark.vllm]

SWAPS, STREAMS = 8, 16


async def test_swaps_under_streams(
    start_gateway: StartGateway, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions come one right after the other, and each slot of the server is used several times."""
    monkeypatch.setattr(swaps, "ROUNDS", 1)
    monkeypatch.setattr(swaps, "SETTLE_S", 0)
    gateway = start_gateway(max_loras=3)
    seen, streams = await swaps.measure(gateway, broker, swaps=SWAPS, streams=STREAMS, calm_s=1)
    labels = await swaps.check_labels(broker, streams, STREAMS)
    assert streams.failures == []
    assert (labels["mislabelled"], labels["versions"]) == (0, SWAPS + 1)
    assert labels["exchanges"] == seen["requests"] >= STREAMS
    assert labels["logprob_diff_own_max"] < 1e-3 < labels["logprob_diff_next_version_min"]
    # A new version does not wait until the streams of the old one have ended. How long the gaps between chunks are is
    # measured by `benchmarks.swaps` on a quiet machine.
    assert streams.beside
    recorded = [e for number in range(STREAMS) for e in await exchanges(broker, f"swap-{number}")]
    assert {e.status for e in recorded} == {"complete"}
    assert older_than_before([(e.started_at, e.at, e.step) for e in recorded]) == []
