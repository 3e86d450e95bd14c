"""Reading the calls of waiting groups."""

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.chat.sampling import Defaults
from pipeline.config import Config, DistillConfig, TrainerConfig
from pipeline.events import ExchangeRecorded, GroupScored, Hint, Member
from pipeline.log.messages import Place
from tests.trainer.kit import exchange
from trainer.batches.groups import AdmittedGroup, GroupWithHistory, History
from trainer.batches.histories import Histories, MayTrain, _render_hints
from trainer.distillation.prompts import HintedPrompts
from trainer.tiny import make_tokenizer

POLICY_ONLY = Config().may_train


def asked(trajectory: str, call: int, **more: Any) -> ExchangeRecorded:
    request = msgspec.json.encode({"messages": [{"role": "user", "content": "What?"}]})
    response = msgspec.json.encode({"choices": [{"message": {"role": "assistant", "content": "b3"}}]})
    return exchange(trajectory, call, [5], [6], **{"request": request, "response": response, **more})


def with_hints(
    tmp_path: Path, best: list[ExchangeRecorded], hints: int, longest: int | None, may_train: MayTrain = POLICY_ONLY
) -> History:
    """A group of two runs, whose worse one has so many hints on its call 0, as its teacher is asked."""
    make_tokenizer([]).save_pretrained(tmp_path)
    config = DistillConfig(best_run_reward=0.5, hint_template=" {hint}", correction_template=" best: {hint}")
    prompts = HintedPrompts(str(tmp_path), config, longest)
    worse = Member(trajectory="worse", reward=0.0, exchanges=1, hints=(Hint(call=0, text="b2"),) * hints)
    better = Member(trajectory="best", reward=1.0, exchanges=1)
    history = History()
    _render_hints(history, prompts, [(better, best), (worse, [asked("worse", 0)])], may_train)
    return history


@pytest.mark.parametrize(
    ("hints", "spare", "unused", "taught"), [(1, 0, 0, 1), (1, -1, 1, 1), (1, -50, 2, 0), (0, -1, 1, 0)]
)
def test_without_room_for_the_best_run_a_calls_own_hints_stand_alone(
    tmp_path: Path, hints: int, spare: int, unused: int, taught: int
) -> None:
    """Both fit; the hint alone fits; none fits; there is no hint."""
    best = [asked("best", 0)]
    whole = with_hints(tmp_path / "whole", best, hints, None).teacher_prompts["worse"][0]
    group = with_hints(tmp_path / "short", best, hints, max(len(whole) + 1 + spare, 1))
    assert (group.hints, group.hints_unused) == (hints + 1, unused)
    assert len(group.teacher_prompts.get("worse", {})) == taught
    if taught:
        alone = with_hints(tmp_path / "alone", [], hints, None).teacher_prompts["worse"][0]
        np.testing.assert_array_equal(group.teacher_prompts["worse"][0], alone if unused else whole)


def test_a_best_run_that_is_no_chat_is_not_shown_and_ends_nothing(tmp_path: Path) -> None:
    group = with_hints(tmp_path, [asked("best", 0, request=b'{"prompt": "What?"}')], 1, None)
    assert (group.hints, group.hints_unused) == (2, 1)
    assert list(group.teacher_prompts["worse"]) == [0]


@pytest.mark.parametrize("may", [True, False])
def test_a_best_run_that_an_outside_model_answered_is_shown_where_it_may_train(tmp_path: Path, may: bool) -> None:
    best = [asked("best", 0, policy_version="outside:master")]
    taught = with_hints(tmp_path, best, 0, None, may_train=lambda _: may)
    assert (taught.hints, taught.hints_unused, list(taught.teacher_prompts)) == (1, 1 - may, ["worse"] * may)


async def test_the_requests_of_a_groups_runs_are_not_in_memory_together() -> None:
    """Each request repeats its conversation, so that they are much larger than the tokens."""

    async def read(_: Any, *, trajectory: str, **__: Any) -> list[Any]:
        request = b'{"messages": [], "note": "%b"}' % (b"x" * 1_000_000)
        calls = [exchange(trajectory, call, [call, 5], [7, 8], request=request + b" " * call) for call in range(3)]
        return [SimpleNamespace(event=call) for call in calls]

    members = tuple(Member(trajectory=f"t{n}", reward=float(n), exchanges=3) for n in range(30))
    group = AdmittedGroup(GroupScored(project="p", group="g", model="m", judge="j", members=members), Place(1, 0))
    broker: Any = SimpleNamespace(read=read)
    tracemalloc.start()
    try:
        read = await Histories(broker, TrainerConfig(), Defaults(), None, POLICY_ONLY).read(group)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(read, GroupWithHistory)
    assert len(read.sequences) == 90
    assert peak < 20_000_000, peak
