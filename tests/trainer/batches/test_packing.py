"""In every layout, a trained token's logprob equals that of its sequence alone."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config import LoraConfig, MemoryConfig, TrainerConfig
from tests.trainer.kit import backward, exactly, sequence, stir, tree_of_conversations
from trainer.batches.examples import Example
from trainer.batches.packing import (
    FULL,
    AttentionSpan,
    Cost,
    SharingLimits,
    attended_pairs,
    micro_batches,
    padded,
    prefix_shared,
    sharing_pays,
)
from trainer.engine import tree_attention
from trainer.engine.engine import Engine
from trainer.engine.parallel import Job
from trainer.engine.passes import Passes
from trainer.sequences import TokenSequence


@pytest.fixture(scope="module")
def engine(tiny_base: str) -> Engine:
    made = exactly(Engine(tiny_base, TrainerConfig(dtype="float64", lora=LoraConfig(rank=4))))
    stir(made)
    return made


@pytest.mark.parametrize("seed", range(20))
def test_a_token_attends_to_its_own_sequence_only(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = [sequence(list(map(int, rng.integers(2, 4, int(rng.integers(2, 9))))), [1]) for _ in range(8)]
    for one in sequences:
        one.loss_mask[1:] = True
    layout = prefix_shared(sequences, [0] * 8)
    mask = layout.dense_mask()
    assert mask is not None
    for s, one in enumerate(sequences):
        columns = [int(c) for c, owner in zip(layout.cols_N, layout.sequence_N, strict=True) if owner == s]
        assert layout.ids_RL[0, columns].tolist() == one.ids[:-1].tolist()
        for depth, column in enumerate(columns):
            assert np.flatnonzero(mask[0, 0, column]).tolist() == sorted(columns[: depth + 1])


def test_a_prediction_that_several_sequences_share_is_scored_once() -> None:
    group = [sequence([5] * 20 + [7, 8, 9 + i], [20, 21, 22]) for i in range(8)]
    layout = prefix_shared(group, [0] * 8)
    assert layout.distinct_U is not None
    # Two tokens in common, and a last one each.
    assert len(layout.distinct_U) == 2 + 8
    predictions = torch.stack([layout.rows_N, layout.cols_N, layout.targets_N])
    assert (predictions[:, layout.distinct_U][:, layout.same_N] == predictions).all()
    assert padded(group).distinct_U is None
    # The logprob of a token also depends on how it was sampled.
    warm = dataclasses.replace(group[1], temperatures=np.full(23, 0.5, np.float32))
    layout = prefix_shared([group[0], warm], [0, 0])
    assert layout.distinct_U is None


def test_rows_without_branches_need_no_mask() -> None:
    """Regression: a run alone in its group had a mask of L x L, nine million booleans for 3,000 tokens."""

    def sequence(*ids: int) -> TokenSequence:
        return TokenSequence.made_up("t", np.array(ids), 2)

    alone, continued = sequence(1, 2, 3, 4), sequence(1, 2, 3, 4, 5, 6)
    branch, other = sequence(1, 2, 9, 9, 9), sequence(8, 8, 8)
    layout = prefix_shared([alone, continued, other], [0, 0, 1])
    assert layout.ends_RL is None
    assert layout.positions_RL is None
    assert layout.tokens == 5 + 2
    assert prefix_shared([alone, branch], [0, 0]).ends_RL is not None
    batches = micro_batches([alone, branch, other, continued], [0, 0, 1, 2], 100, "prefix")
    assert [(sorted(b.indices), b.layout.ends_RL is None) for b in batches] == [([2, 3], True), ([0, 1], False)]


def test_prefixes_are_shared_if_that_costs_less() -> None:
    cost = Cost.of(parameters=4_000_000, width=4 * 256)
    rng = np.random.default_rng(0)

    def group(shared: int, own: int, size: int = 8) -> list[TokenSequence]:
        prompt = rng.integers(2, 4000, shared).tolist()
        return [sequence(prompt + rng.integers(2, 4000, own).tolist(), [shared, shared + own - 1]) for _ in range(size)]

    assert sharing_pays(group(2000, 200), [0] * 8, cost)
    assert sharing_pays(group(60, 20), [0] * 8, cost)
    # Little in common and long: the masks cost more than the tree saves.
    assert not sharing_pays(group(20, 1000), [0] * 8, cost)
    assert not sharing_pays(group(1, 50), [0] * 8, cost)


@pytest.mark.parametrize("packing", ["padded", "prefix"])
@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_micro_batches_hold_every_sequence_once_within_the_budget(packing: str, budget: int) -> None:
    sequences, groups = tree_of_conversations()
    batches = micro_batches(sequences, groups, budget, packing)  # type: ignore[arg-type]
    assert sorted(i for b in batches for i in b.indices) == list(range(len(sequences)))
    if budget == 10_000:
        assert len(batches) == 1
    if budget == 40 and packing == "padded":
        assert all(b.layout.ids_RL.numel() <= 40 for b in batches)


def test_groups_that_begin_alike_share_a_row() -> None:
    """Up to the limit, and only where they have enough in common: an agent's system prompt, not a first token."""
    system = list(range(100, 120))

    prompts = [[*system, 10], [1, 11], [*system, 12], [1, 13]]
    sequences = [sequence([*p, 7, reply, 3], [len(p) + 1, len(p) + 2]) for p in prompts for reply in (4, 5)]

    def shape(of_row: int) -> tuple[int, ...]:
        (batch,) = micro_batches(sequences, [0, 0, 1, 1, 2, 2, 3, 3], 10_000, "prefix", SharingLimits(of_row=of_row))
        assert sorted(batch.indices) == list(range(8))
        return (batch.layout.tokens, *batch.layout.ids_RL.shape)

    assert shape(27) == (24 + 24 + 5 + 5, 4, 24)
    assert shape(28) == (28 + 5 + 5, 3, 28)


def test_groups_with_a_system_prompt_go_to_several_processes_whole(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that was: by the tokens of rows that groups share, a group's own tree was too large for a process, and
    each of its replies was computed with the prompt again."""
    system = list(range(100, 600))
    prompts = [[*system, *range(10 * n, 10 * n + 50)] for n in range(60, 64)]
    groups = [n for n in range(4) for _ in range(8)]
    examples = [
        Example(sequence([*prompts[group], *(reply + 2 for _ in range(60))], list(range(550, 610))), 1.0)
        for reply, group in zip([*range(8)] * 4, groups, strict=True)
    ]

    class Four:
        size = 4

        def partition(self, batches: list[Any], even: bool) -> list[Any]:
            return batches

    monkeypatch.setattr(engine.passes, "_process_group", Four())
    monkeypatch.setattr(Passes, "_limits", SharingLimits(of_row=16_384))
    job = Job(0, engine.config, {}, examples, groups, 16_384, "prefix", "logprobs", False)
    batches = engine.passes._own_batches(job)
    assert [b.layout.tokens for b in batches] == [550 + 8 * 59] * 4


@pytest.mark.parametrize("seed", range(5))
def test_pairs_are_counted_as_the_plan_attends(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "_PAIRS_A_CALL", -(2**30))
    sequences, _ = tree_of_conversations(seed)
    layout = prefix_shared(sequences, [0] * len(sequences))
    assert layout.ends_RL is not None
    mask = tree_attention.mask_with_plan(layout, FULL)
    (row,) = mask.plan  # type: ignore[attr-defined]
    attended = [segment.seen[-1][1] * sum(count for _, count in segment.seen) for segment in row]
    assert attended_pairs(layout.ends_RL[0].tolist()) == sum(attended)


@pytest.mark.parametrize("attention", ["dense", "by segments"])
def test_gradients_do_not_depend_on_the_layout(tiny_base: str, monkeypatch: pytest.MonkeyPatch, attention: str) -> None:
    """Also where every prefix tree, however small, is computed by segments."""
    if attention == "by segments":
        monkeypatch.setattr(tree_attention, "_PAIRS_A_CALL", -(2**30))
    sequences, groups = tree_of_conversations(3)
    advantages = np.random.default_rng(1).normal(size=len(sequences))
    batch = [Example(s, float(a)) for s, a in zip(sequences, advantages, strict=True)]
    monkeypatch.setattr(Passes, "_limits", SharingLimits(of_pass=1024, of_row=1024, in_common=1))
    gradients = []
    for packing, budget in (("padded", 10_000), ("prefix", 10_000), ("prefix", 30), ("padded", 30)):
        config = TrainerConfig(
            dtype="float64", lora=LoraConfig(rank=4), memory=MemoryConfig(packing=packing, tokens_per_batch=budget)
        )  # type: ignore[arg-type]
        engine = exactly(Engine(tiny_base, config))
        stir(engine)
        metrics = backward(engine, batch, groups, 0)
        gradients.append((metrics["loss"], [p.grad.clone() for p in engine.model.parameters]))
    first_loss, first = gradients[0]
    assert max(g.abs().max() for g in first) > 1e-4
    for loss, other in gradients[1:]:
        assert loss == pytest.approx(first_loss, rel=1e-10)
        for mine, theirs in zip(other, first, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10 * float(theirs.abs().max()))


@pytest.mark.parametrize("span", [AttentionSpan(window=4), AttentionSpan(chunk=3)], ids=str)
def test_a_sliding_window_is_measured_along_the_sequence(span: AttentionSpan) -> None:
    sequences, groups = tree_of_conversations(4)
    layout = prefix_shared(sequences, groups)
    dense = layout.dense_mask(span)
    assert dense is not None
    assert layout.positions_RL is not None
    for n, (row, column) in enumerate(zip(layout.rows_N.tolist(), layout.cols_N.tolist(), strict=True)):
        one = sequences[int(layout.sequence_N[n])]
        at = int(layout.positions_RL[row, column])
        first = max(0, at + 1 - span.window) if span.window else at // span.chunk * span.chunk
        seen = torch.nonzero(dense[row, 0, column]).flatten()
        assert layout.ids_RL[row, seen].tolist() == one.ids[first : at + 1].tolist()
