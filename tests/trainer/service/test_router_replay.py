"""Router replay from the log: the trainer's logprobs are those that a sampler with other choices recorded."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config import NatsConfig, TrainerConfig
from pipeline.log.broker import Broker
from tests.kits.settings import with_values
from tests.trainer import kit
from tests.trainer.families import make
from tests.trainer.kit import dead_letters, running, steps_reach, until
from trainer.batches.metrics import replay_metrics
from trainer.batches.packing import padded
from trainer.engine.engine import Engine
from trainer.sequences import build

pytestmark = pytest.mark.anyio

PROMPT, REPLY = [5, 6, 7, 8, 9], [10, 11, 12]


async def publish(broker: Broker, name: str, experts: np.ndarray, logprobs: list[float]) -> None:
    file = io.BytesIO()
    np.save(file, experts.astype(np.uint8))
    for member in (scored := kit.group(name, [0.0, 1.0], exchanges=1)).members:
        recorded = {"experts": file.getvalue(), "logprobs": logprobs}
        await broker.publish(kit.exchange(member.trajectory, 0, PROMPT, REPLY, **recorded))  # type: ignore[arg-type]
    await broker.publish(scored)


async def test_recorded_choices_are_replayed_and_impossible_ones_are_dead_letters(
    broker: Broker, nats_config: NatsConfig, tmp_path: Path
) -> None:
    base = make("qwen3_moe", tmp_path / "base")
    replayed = {"router_replay": True, "lora.rank": 4}
    engine = Engine(base, with_values(TrainerConfig(), replayed))
    replay = engine.model.forward.replay
    # No token's scores give these experts, or a bound on the difference would prove nothing.
    experts = np.random.default_rng(0).permuted(
        np.tile(np.arange(replay.experts), (len(PROMPT + REPLY) - 1, replay.layers, 1)), axis=-1
    )[..., : replay.k]
    file = io.BytesIO()
    np.save(file, experts.astype(np.uint8))
    call = kit.exchange("t", 0, PROMPT, REPLY, experts=file.getvalue())
    (chosen,), (own,) = build("t", [call], replay=True), build("t", [call])
    with torch.no_grad():
        sampled, others = (engine.model.logprobs(padded([s]), (1, len(REPLY)))[0][0] for s in (chosen, own))
    assert float((sampled - others).abs().mean()) > 1e-2
    config = kit.settings(base, tmp_path, nats_config, groups_per_step=1, logprob_bound=1e-4, **replayed)
    async with running(config):
        await publish(broker, "odd", experts + replay.experts, sampled.tolist())

        async def letters() -> list[str]:
            return [letter.detail async for letter in dead_letters(broker)]

        (said,) = await until(letters)
        assert "does the inference server serve another model?" in said
        await publish(broker, "planted", experts, sampled.tolist())
        (step,) = await steps_reach(broker, 1)
    assert step.metrics["on_policy_logprob_diff_max"] < 1e-4


def test_tokens_without_choices_are_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """As those of a streamed call, with which vLLM returns none."""
    file = io.BytesIO()
    np.save(file, np.zeros((len(PROMPT + REPLY) - 1, 2, 2), np.uint8))

    def told(*recorded: bytes) -> tuple[float, list[dict[str, int]]]:
        caplog.clear()
        calls = [kit.exchange(f"t{n}", 0, PROMPT, REPLY, experts=experts) for n, experts in enumerate(recorded)]
        sequences = [s for call in calls for s in build(call.trajectory, [call], replay=True)]
        metrics = replay_metrics([kit.training_group(kit.group("g", [0.0, 1.0]), sequences)])
        warnings = [vars(r)["fields"] for r in caplog.records if "streamed" in r.getMessage()]
        return metrics["tokens_replayed"], warnings

    assert told(file.getvalue(), file.getvalue()) == (6.0, [])
    assert told(file.getvalue(), b"") == (3.0, [{"tokens": 3, "of": 6}])
