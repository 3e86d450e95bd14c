"""The longest trajectory that has to pass: 200 turns, 128k tokens, most events beyond the payload limit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.events import ExchangeRecorded, pack_ids, pack_logprobs
from pipeline.log.broker import Broker
from store.lake.lake import lake_in
from tests.store.kit import StoreProcess, exchange, store_all, tables

pytestmark = pytest.mark.anyio

TURNS, TOKENS = 200, 131_072


@pytest.mark.slow
async def test_200_turns_and_128k_tokens_come_back_token_for_token(
    broker: Broker, running_store: StoreProcess, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150_000, TOKENS)
    per_turn = TOKENS // TURNS
    for turn in range(TURNS):
        end = (turn + 1) * per_turn
        await broker.publish(
            exchange(
                "long",
                turn,
                request=b'{"messages": "' + b"word " * end + b'"}',
                prompt_ids=pack_ids(ids[: end - 100]),
                sampled_ids=pack_ids(ids[end - 100 : end]),
                logprobs=pack_logprobs(np.linspace(-2, 0, 100)),
            )
        )
    assert (await broker.stream_info("OBJ_CLAIMS_ROLLOUTS")).state.messages > TURNS / 4
    history = [r.event for r in await broker.read(ExchangeRecorded, project="p", trajectory="long")]
    assert [e.seq for e in history if isinstance(e, ExchangeRecorded)] == list(range(TURNS))
    await store_all(broker, running_store)
    found = tables(lake_in(tmp_path / "store"), "rollout.exchange")
    wanted = ["seq", "prompt_ids", "sampled_ids"]
    rows = sorted((row for t in found for row in t.select(wanted).to_pylist()), key=lambda row: row["seq"])
    assert [r["seq"] for r in rows] == list(range(TURNS))
    last = rows[-1]
    assert last["prompt_ids"] + last["sampled_ids"] == ids[: TURNS * per_turn].tolist()
