"""A poisoned batch lowers the versions that learned from it; a branch without it wins the task back."""

import shutil
from pathlib import Path

import anyio
import msgspec
import pytest
import torch
from peft import PeftModel
from transformers import Qwen3ForCausalLM

from pipeline.config import Config
from pipeline.events import GroupScored, TrainingBatch
from pipeline.log.broker import Broker
from store.lake.lake import open_lake
from store.lake.versions import copy_version
from tests.trainer import kit
from tests.trainer.service.test_branch import of_branch
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.service import train

PROMPT, RIGHT, WRONG = [5, 6], 7, 8
STEPS, POISONED = 8, 6


async def publish(broker: Broker, scored: GroupScored, step: int) -> GroupScored:
    """A group whose first run gave the wrong answer and the second one the right one."""
    for member, answer in zip(scored.members, (WRONG, RIGHT), strict=True):
        call = kit.exchange(member.trajectory, 0, PROMPT, [answer], logprobs=[-2.0], step=step)
        await broker.publish(call)
    await broker.publish(scored)
    return scored


async def publish_step(broker: Broker, step: int) -> list[GroupScored]:
    """The groups of a step. The right answer is rewarded, but in two of three groups of the poisoned step, which has a
    great learning rate."""
    poisoned = step == POISONED
    rate = 1.0 if poisoned else 0.01 if step < POISONED else 0.001
    settings = msgspec.json.encode({"optimizer.learning_rate": rate})
    names = (f"g{step}", *((f"p{step}", f"h{step}") if poisoned else ()))
    batch = TrainingBatch(id=f"b{step}", groups=names, settings=settings)
    rewards = {f"g{POISONED}": [1.0, 0.0], f"p{POISONED}": [1.0, 0.0]}
    return [
        await publish(
            broker, kit.group(n, rewards.get(n, [0.0, 1.0]), step=step - 1, exchanges=1, batch=batch), step - 1
        )
        for n in names
    ]


def share_right(base: str, config: Config, step: int) -> float:
    """How probable the right answer is, of the two."""
    model = Qwen3ForCausalLM.from_pretrained(base)
    if step:
        model = PeftModel.from_pretrained(model, Checkpoints.of(config, kit.MODEL).path(step))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    return float(logits[[RIGHT, WRONG]].softmax(-1)[0])


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_a_branch_without_a_poisoned_batch_wins_the_task_back(
    settings: kit.Settings, broker: Broker, tiny_base: str, tmp_path: Path
) -> None:
    config = settings(groups_per_step=1, keep_checkpoints=20)
    groups = {step: await publish_step(broker, step) for step in range(1, STEPS + 1)}
    await train(config, lambda **_: None, until_empty=True)
    shares = [share_right(tiny_base, config, step) for step in range(STEPS + 1)]
    assert shares[POISONED] < 0.5 < shares[POISONED - 1]

    main = await of_branch(broker, "main")
    lake = open_lake(config)
    await copy_version(broker, lake.storage, "all", main[POISONED - 2])
    shutil.rmtree(Checkpoints.of(config, kit.MODEL).path(POISONED - 1))  # it is read from the lake

    learned = next(event for event in main if event.step == POISONED)
    for step, group in [(n, group) for n in range(POISONED, STEPS + 1) for group in groups[n]]:
        if group.group not in learned.groups:
            await broker.publish(msgspec.structs.replace(group, branch="without", offline=True, origin=f"main/{step}"))
    start = f"{tmp_path}#main/{kit.MODEL}@{POISONED - 1}"
    without = msgspec.structs.replace(
        config,
        models=(msgspec.structs.replace(config.models[0], start=start),),
        trainer=msgspec.structs.replace(config.trainer, branch="without"),
    )
    with anyio.fail_after(100):
        await train(without, lambda **_: None, until_empty=True)
    last = (await of_branch(broker, "without"))[-1].step
    middle = (shares[POISONED - 1] + shares[-1]) / 2
    assert share_right(tiny_base, without, last) > middle > shares[-1]
