"""A tiny random Qwen3, exchanges, groups and sequences for it, and the trainer service on a log."""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import anyio
import msgspec
import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from pipeline import streams
from pipeline.config import Config, ModelConfig, NatsConfig, TrainerConfig, VllmConfig
from pipeline.events import (
    CheckpointPublished,
    DeadLettered,
    ExchangeRecorded,
    GroupDiscarded,
    GroupScored,
    Member,
    pack_logprobs,
    pack_mask,
    pack_seqs,
)
from pipeline.log.broker import Broker
from pipeline.log.messages import Place
from tests.kits import events
from tests.kits.settings import with_values
from tests.kits.waiting import until
from trainer.batches.examples import Example
from trainer.batches.groups import AdmittedGroup, GroupWithHistory, History, trainable_members
from trainer.engine.engine import Engine
from trainer.engine.state import TrainState
from trainer.sequences import TokenSequence, build

VOCAB = 32
Event = TypeVar("Event")
MODEL = "tiny"


def make_model(folder: Path, seed: int = 0, **changed: Any) -> str:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    config = Qwen3Config(**sizes | changed)
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return str(folder)


def logprobs_of(base: str, prompt: Sequence[int], sampled: Sequence[int]) -> list[float]:
    """Logprobs, in nats, with which the base model samples a reply."""
    ids = torch.tensor([[*prompt, *sampled]])
    with torch.no_grad():
        logits = Qwen3ForCausalLM.from_pretrained(base)(input_ids=ids).logits[0]
    places = range(len(prompt) - 1, len(prompt) + len(sampled) - 1)
    return [float(logits[at].log_softmax(-1)[token]) for at, token in zip(places, sampled, strict=True)]


def exactly(engine: Engine) -> Engine:
    """`engine`, which was made with dtype `float64`, with norms in float64 too: transformers computes them in float32.

    Comparisons in float64 need no tolerance that depends on the processor's order of summation."""

    def forward(norm: Qwen3RMSNorm, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)

    for module in engine.model.peft.modules():
        if isinstance(module, Qwen3RMSNorm):
            module.forward = partial(forward, module)
    return engine


def stir(engine: Engine, seed: int = 1) -> None:
    """Random weights for the live adapter, which changes nothing when it is fresh."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in engine.model.parameters:
            parameter.normal_(std=0.1)


def backward(engine: Engine, examples: Sequence[Example], group_of: Sequence[int], step: int) -> dict[str, float]:
    """Add the gradient of the batch's loss to the live adapter's. Return the metrics of the batch as seen from
    `step`."""
    return engine.passes.summary(engine.passes.gradients(examples, group_of), examples, step, 1)


def settings(base: str, run_dir: Path, nats: NatsConfig | None = None, **trainer: object) -> Config:
    defaults: dict[str, object] = {
        "groups_per_step": 2,
        "lora.rank": 4,
        "optimizer.learning_rate": 1e-2,
        "logprob_bound": 1e9,  # the logprobs that `exchange` makes up are no model's
    }
    return Config(
        project="p",
        run_dir=str(run_dir),
        nats=nats or NatsConfig(),
        models=(ModelConfig(name=MODEL, base=base),),
        trainer=with_values(TrainerConfig(), defaults | trainer),
    )


Settings = Callable[..., Config]
"""Makes the settings of a trainer on the test's own log, of those that differ from `settings`' defaults."""


def with_many_loras(config: Config) -> Config:
    """`config` as `load` accepts it under a large staleness bound."""
    return msgspec.structs.replace(config, vllm=VllmConfig(max_loras=200))


def exchange(
    trajectory: str,
    seq: int,
    prompt: Sequence[int],
    sampled: Sequence[int],
    *,
    logprobs: Sequence[float] | None = None,
    step: int = 0,
    forced: Sequence[int] | None = None,
    **other: object,
) -> ExchangeRecorded:
    known = [-2.0] * len(sampled) if logprobs is None else logprobs
    fields: dict[str, object] = {
        "model": MODEL,
        "policy_version": f"{MODEL}@{step}",
        "step": step,
        "logprobs": pack_logprobs(known),
        "forced": b"" if forced is None else pack_mask(forced),
        "finish_reason": "stop",
    }
    return events.exchange(trajectory, seq, prompt, sampled, **(fields | other))


def group(
    name: str,
    rewards: Sequence[float],
    *,
    step: int = 0,
    exchanges: int = 2,
    split: Literal["train", "val"] = "train",
    **other: object,
) -> GroupScored:
    members = tuple(
        Member(
            trajectory=f"{name}-{i}",
            reward=r,
            exchanges=exchanges,
            split=split,
            first_step=step,
            last_step=step,
            metrics={"turns": float(i)},
        )
        for i, r in enumerate(rewards)
    )
    fields: dict[str, object] = {"project": "p", "model": MODEL, "judge": "j", "members": members}
    return GroupScored(group=name, split=split, **(fields | other))  # type: ignore[arg-type]


def training_group(
    scored: GroupScored, sequences: Sequence[TokenSequence], seq: int = 1, **history: Any
) -> GroupWithHistory:
    """A scored group with its sequences, as it joins a batch."""
    return GroupWithHistory(AdmittedGroup(scored, Place(seq, 0)), History(tuple(sequences), **history))


def checkpoint_event(step: int, files: Mapping[str, bytes] | None = None) -> CheckpointPublished:
    """The event of a checkpoint of `MODEL` that holds `files`."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in (files or {}).items()}
    learned = {"groups": ("g",), "group_seqs": pack_seqs([1]), "group_times": pack_seqs([2]), "metrics": {"loss": 0.5}}
    return events.checkpoint(step, MODEL, at=2, base_model="base", files=digests, started_at=1, **learned)


def turns(trajectory: str, seed: int, *, step: int = 0) -> list[ExchangeRecorded]:
    """Two turns, the second continuing the first."""
    rng = np.random.default_rng(seed)
    first, reply, more, last = (rng.integers(2, VOCAB, n).tolist() for n in (6, 3, 2, 3))
    prompt = [2, 3, 4, *first]
    return [
        exchange(trajectory, 0, prompt, reply, step=step),
        exchange(trajectory, 1, prompt + reply + more, last, step=step),
    ]


def conversation(trajectory: str, calls: int, **other: Any) -> list[ExchangeRecorded]:
    """Calls that continue each other; each sends one more token and samples two."""
    return [exchange(trajectory, call, [5, 7, 8] * call + [5], [7, 8], **other) for call in range(calls)]


def played(scored: GroupScored, **history: Any) -> GroupWithHistory:
    """The group with a sequence for every member that trains (`conversation`)."""
    runs = [build(m.trajectory, conversation(m.trajectory, m.exchanges)) for m in trainable_members(scored)]
    return training_group(scored, [s for of_run in runs for s in of_run], **history)


async def publish_group(
    broker: Broker, name: str, rewards: Sequence[float], *, step: int = 0, seed: int = 0, **other: object
) -> GroupScored:
    scored = group(name, rewards, step=step, **other)
    for i, member in enumerate(scored.members):
        for event in turns(member.trajectory, 1000 * seed + i, step=step):
            await broker.publish(event)
    await broker.publish(scored)
    return scored


def sequence(ids: list[int], trained: list[int], temperature: float = 1.0) -> TokenSequence:
    n = len(ids)
    mask = np.zeros(n, np.bool_)
    mask[trained] = True
    return TokenSequence(
        "t",
        np.array(ids, np.int32),
        mask,
        np.full(n, -1.0, np.float32),
        np.zeros(n, np.int32),
        np.full(n, temperature, np.float32),
    )


def tree_of_conversations(seed: int = 0) -> tuple[list[TokenSequence], list[int]]:
    """Two groups whose members share prompts, replies, all of it, or nothing."""
    rng = np.random.default_rng(seed)

    def some(n: int) -> list[int]:
        return list(map(int, rng.integers(2, VOCAB, n)))

    out: list[TokenSequence] = []
    group_of: list[int] = []
    for group in range(2):
        prompt, reply, turn = some(9), some(3), some(4)
        for ids in (
            prompt + reply + turn + some(3),
            prompt + reply + turn + some(5),
            prompt + reply,
            prompt + reply,
            prompt + some(4),
            some(7),
            prompt[:5] + some(2),
        ):
            trained = sorted(rng.choice(np.arange(1, len(ids)), 3, replace=False).tolist())
            out.append(sequence(ids, trained, temperature=float(rng.choice([0.7, 1.0]))))
            group_of.append(group)
    return out, group_of


async def publish_calls(broker: Broker, name: str, sampled: Sequence[int], **other: object) -> GroupScored:
    """A group of two trajectories, each with one call that sampled `sampled`; `other` are fields of the exchanges."""
    scored = group(name, [0.0, 1.0], exchanges=1)
    for member in scored.members:
        await broker.publish(exchange(member.trajectory, 0, [5, 6], sampled, **other))  # type: ignore[arg-type]
    await broker.publish(scored)
    return scored


# -- the service on a log ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[dict[str, Any]]:
    """The trainer service, ready; stopped at the block's end."""
    from trainer import service  # the engine's tests do without it

    facts: dict[str, Any] = {}
    started = anyio.Event()

    def ready(**said: str | int | float) -> None:
        facts.update(said)
        started.set()

    async with anyio.create_task_group() as tg:
        tg.start_soon(service.serve, config, ready)
        with anyio.fail_after(60):
            await started.wait()
        yield facts
        tg.cancel_scope.cancel()


Training = Callable[..., AbstractAsyncContextManager[Broker]]
"""Starts the trainer service on a log of its own, under the settings that it is called with. Yields a connection."""


@asynccontextmanager
async def training(nats: NatsConfig, base: str, run_dir: Path, **trainer: object) -> AsyncIterator[Broker]:
    """A connection to the log of a trainer service under these settings, which is ready."""
    async with Broker.connect(nats) as broker, running(settings(base, run_dir, nats, **trainer)):
        yield broker


async def checkpoints(broker: Broker) -> list[CheckpointPublished]:
    history = await broker.read(CheckpointPublished)
    return [r.event for r in history]


async def discards(broker: Broker) -> list[GroupDiscarded]:
    history = await broker.read(GroupDiscarded)
    return [r.event for r in history]


async def unacked(broker: Broker) -> int:
    info = await broker.consumer_info(streams.consumer("trainer"))
    return int(info.num_ack_pending or 0) + int(info.num_pending or 0)


async def reach(n: int, read: Callable[[Broker], Awaitable[list[Event]]], broker: Broker) -> list[Event]:
    """What `read` finds on the log, once that is at least `n` events."""

    async def probe() -> list[Event]:
        found = await read(broker)
        return found if len(found) >= n else []

    return await until(probe)


async def steps_reach(broker: Broker, n: int) -> list[CheckpointPublished]:
    return await reach(n, checkpoints, broker)


async def all_acked(broker: Broker) -> None:
    async def probe() -> bool:
        return await unacked(broker) == 0

    await until(probe)


async def dead_letters(broker: Broker) -> list[DeadLettered]:
    history = await broker.read(DeadLettered)
    return [r.event for r in history]


def dies_of(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step over trajectories of this group raise, as if the process had died."""
    original = Engine.step

    def step(self: Engine, state: TrainState, examples: Any, group_of: Any) -> Any:
        if any(e.sequence.trajectory.startswith(name) for e in examples):
            raise SystemError("as if the process had died")
        return original(self, state, examples, group_of)

    monkeypatch.setattr(Engine, "step", step)
