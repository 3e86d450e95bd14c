"""Groups with hints, in the trainer service on a log."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from pipeline.config import NatsConfig
from pipeline.events import Hint, Member
from pipeline.log.broker import Broker
from tests.trainer import kit
from tests.trainer.kit import VOCAB, all_acked, discards, running, steps_reach, until

pytestmark = pytest.mark.anyio

REQUEST = msgspec.json.encode({"messages": [{"role": "user", "content": "5 6"}]})


@pytest.fixture
def chat_base(tiny_base: str, tmp_path: Path) -> str:
    """The tiny model with a tokenizer of its ids as words."""
    folder = tmp_path / "base"
    shutil.copytree(tiny_base, folder)
    tokenizer = Tokenizer(WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template).save_pretrained(folder)
    return str(folder)


async def publish(broker: Broker, name: str, hints: tuple[Hint, ...], step: int = 0) -> None:
    """A group of one run of two calls, which has hints and no reward."""
    member = Member(
        trajectory=f"{name}-0", reward=0.0, exchanges=2, first_step=step, last_step=step, hints=hints
    )
    for event in kit.turns(member.trajectory, 3, step=step):
        await broker.publish(msgspec.structs.replace(event, request=REQUEST))
    await broker.publish(kit.group(name, [], members=(member,)))


async def test_single_runs_with_hints_and_no_reward_become_a_checkpoint(
    nats_config: NatsConfig, chat_base: str, tmp_path: Path
) -> None:
    """What is taught: the three tokens of call 0. A hint of a call that the run has not is counted. Old runs, and runs
    without hints, are discarded as ever."""
    config = kit.settings(
        chat_base, tmp_path, nats_config,
        **{"groups_per_step": 1, "max_staleness": 0, "distill.weight": 1.0, "distill.divergence": "reverse_kl",
           "distill.hint_template": " {hint}"},
    )  # fmt: skip
    async with Broker.connect(nats_config) as broker, running(config):
        await publish(broker, "none", ())
        await publish(broker, "hinted", (Hint(call=-1, text="9"), Hint(call=7, text="9")))
        (event,) = await steps_reach(broker, 1)
        assert event.groups == ("hinted",)
        assert event.metrics["tokens_taught"] == 3
        assert event.metrics["hints_unused"] == 1
        assert event.metrics["grad_norm"] > 0
        await publish(broker, "old", (Hint(call=0, text="9"),))
        await all_acked(broker)

        async def both() -> bool:
            return len(await discards(broker)) == 2

        await until(both)
        assert {(d.group, d.reason) for d in await discards(broker)} == {
            ("none", "too_small"),
            ("old", "stale"),
        }
