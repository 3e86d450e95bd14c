"""Runs with hints, without an agent: a base model with a chat template, and groups whose calls are chats."""

import shutil
from pathlib import Path

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from pipeline.events import Hint, Member, TeacherAnswered, pack_ids, pack_logprobs
from pipeline.log.broker import Broker
from tests.trainer import kit

_REQUEST = msgspec.json.encode({"messages": [{"role": "user", "content": "5 6"}]})
_RESPONSE = msgspec.json.encode({"choices": [{"message": {"role": "assistant", "content": "7"}}]})


def chat_base(tiny_base: str, folder: Path) -> str:
    """Copy the tiny model to `folder`, with a tokenizer of its ids as words."""
    shutil.copytree(tiny_base, folder)
    tokenizer = Tokenizer(WordLevel({str(i): i for i in range(kit.VOCAB)}, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template).save_pretrained(folder)
    return str(folder)


def answer(trajectory: str, teacher: str, tokens: int) -> TeacherAnswered:
    """The answer of a teacher to whom the tokens 1 and 2 are the most probable, at any place."""
    return TeacherAnswered(
        project="p",
        trajectory=trajectory,
        teacher=teacher,
        logprobs=pack_logprobs([-4.0] * tokens),
        top_k=2,
        top_ids=pack_ids([1, 2] * tokens),
        top_logprobs=pack_logprobs([-0.5, -1.5] * tokens),
    )


async def publish(
    broker: Broker,
    name: str,
    hints: tuple[Hint, ...] = (),
    *,
    step: int = 0,
    rewards: tuple[float, ...] = (0.0,),
    seed: int = 3,
    teacher: str = "",
    answered: int = 6,
) -> None:
    """Publish a group of runs of two calls each, all with these hints, or with the answer of a teacher from outside
    about so many tokens."""
    members = tuple(
        Member(
            trajectory=f"{name}-{i}",
            reward=r,
            exchanges=2,
            first_step=step,
            last_step=step,
            hints=hints,
            teacher=teacher,
        )
        for i, r in enumerate(rewards)
    )
    for member in members:
        for event in kit.turns(member.trajectory, seed, step=step):
            await broker.publish(msgspec.structs.replace(event, request=_REQUEST, response=_RESPONSE))
        if teacher:
            await broker.publish(answer(member.trajectory, teacher, answered))
    await broker.publish(kit.group(name, [], members=members))
