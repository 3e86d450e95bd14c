"""The seam between sequences and the model: micro-batches by token budget, padded or with shared prefixes.

A `Layout` says which tokens go through the model, what each may see, and where the predictions for the trained tokens
come out. The loss gets per-token logprobs of shape [S, K] and does not know which layout made them.

Shape letters: S sequences, K most trained tokens in one of them, R rows, L row length, N trained tokens of the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from trainer.batches.sequences import TokenSequence

Int = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Reach:
    """How far back a layer's attention sees, in positions along a sequence; 0: no bound."""

    window: int = 0
    """A query sees this many positions, its own included."""
    chunk: int = 0
    """A query sees positions of its own chunk only, chunks being counted from position 0."""


FULL = Reach()


@dataclass(frozen=True, eq=False)
class Layout:
    """Tokens arranged for one forward pass."""

    ids_RL: torch.Tensor
    positions_RL: torch.Tensor | None
    """None: 0, 1, 2, … in every row."""
    ends_RL: torch.Tensor | None
    """The column after the last one that sees this one: a query q sees a key k where k <= q < ends[k]. None: plain causal."""
    rows_N: torch.Tensor
    cols_N: torch.Tensor
    """Where in [R, L] the hidden state lies that predicts a trained token."""
    targets_N: torch.Tensor
    temperatures_N: torch.Tensor
    sequence_N: torch.Tensor
    slot_N: torch.Tensor
    """Where in [S, K] the trained token belongs."""
    tokens: int
    """Real tokens that go through the model."""
    cuts_N3: torch.Tensor | None = None
    """top_k, top_p and min_p under which each trained token was sampled. `None` where nothing was cut."""

    def dense_mask(self, reach: Reach = FULL) -> torch.Tensor | None:
        """`ends_RL` as a dense mask: True where the row's query (third axis) sees the key (last axis)."""
        if self.ends_RL is None:
            return None
        at_L = torch.arange(self.ends_RL.shape[1], device=self.ends_RL.device)
        seen_RLL = (at_L[None, :, None] >= at_L[None, None, :]) & (
            at_L[None, :, None] < self.ends_RL[:, None, :]
        )
        if self.positions_RL is not None and reach != FULL:
            query_RL1, key_R1L = self.positions_RL[:, :, None], self.positions_RL[:, None, :]
            if reach.window:
                seen_RLL &= query_RL1 - key_R1L < reach.window
            if reach.chunk:
                seen_RLL &= query_RL1 // reach.chunk == key_R1L // reach.chunk
        return seen_RLL.unsqueeze(1)

    def to(self, device: torch.device) -> Layout:
        return Layout(*(v.to(device) if isinstance(v, torch.Tensor) else v for v in vars(self).values()))


@dataclass(frozen=True, eq=False)
class Trained:
    """The trained tokens of a sequence, in order; arrays of shape [k]."""

    at: Int
    targets: Int
    temperatures: npt.NDArray[np.float32]


def _trained(sequence: TokenSequence) -> Trained:
    at = np.flatnonzero(sequence.loss_mask)
    return Trained(at, sequence.ids[at].astype(np.int64), sequence.temperatures[at])


def _used(sequence: TokenSequence) -> npt.NDArray[np.int32]:
    """The ids up to the last one that predicts something: what follows it changes no trained token."""
    return sequence.ids[: int(np.flatnonzero(sequence.loss_mask)[-1])]


def _layout(
    sequences: Sequence[TokenSequence],
    ids_RL: Int,
    where: Sequence[tuple[int, Int]],
    tokens: int,
    positions_RL: Int | None = None,
    ends_RL: Int | None = None,
) -> Layout:
    """`where[s]` is the row of sequence s and the column of each of its used tokens."""
    rows, cols, targets, temperatures, owner, slot = [], [], [], [], [], []
    cuts: list[npt.NDArray[np.float32]] = []
    uncut = np.array([[0, 1, 0]], np.float32)
    for s, (sequence, (row, columns)) in enumerate(zip(sequences, where, strict=True)):
        trained = _trained(sequence)
        n = len(trained.at)
        rows.append(np.full(n, row))
        cols.append(columns[trained.at - 1])
        targets.append(trained.targets)
        temperatures.append(trained.temperatures)
        cuts.append(np.repeat(uncut, n, 0) if sequence.cuts is None else sequence.cuts[trained.at])
        owner.append(np.full(n, s))
        slot.append(np.arange(n))

    def flat(parts: list[Int]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    return Layout(
        torch.from_numpy(ids_RL),
        None if positions_RL is None else torch.from_numpy(positions_RL),
        None if ends_RL is None else torch.from_numpy(ends_RL),
        flat(rows), flat(cols), flat(targets), torch.from_numpy(np.concatenate(temperatures)), flat(owner), flat(slot),
        tokens,
        None if all(s.cuts is None for s in sequences) else torch.from_numpy(np.concatenate(cuts)),
    )  # fmt: skip


def padded(sequences: Sequence[TokenSequence]) -> Layout:
    """One row per sequence, padded on the right: under a causal mask no real token sees the padding."""
    used = [_used(s) for s in sequences]
    length = max(len(u) for u in used)
    ids_RL = np.zeros((len(used), length), np.int64)
    for row, ids in enumerate(used):
        ids_RL[row, : len(ids)] = ids
    where = [(row, np.arange(len(ids))) for row, ids in enumerate(used)]
    return _layout(sequences, ids_RL, where, sum(len(u) for u in used))


@dataclass(eq=False)
class _Tree:
    """Sequences of a group as a prefix tree in one row: a node is a run of tokens, laid out once."""

    ids: Int
    positions: Int
    ends: Int
    """For each token the column after the last of those that continue it. A path's tokens come before what continues them, and
    what continues a token lies together: so a token sees exactly those before it that have not ended."""
    columns: list[Int]
    """For each sequence the column of each of its tokens."""


def _common(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _tree(sequences: Sequence[npt.NDArray[np.int32]]) -> _Tree:
    """Sorted, each sequence shares its longest prefix with the one before it (as in a trie built from sorted words)."""
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tolist())
    columns: list[Int] = [np.zeros(0, np.int64)] * len(sequences)
    ids, positions = [], []
    ends = np.zeros(sum(map(len, sequences)), np.int64)
    size = 0
    before = -1
    for i in order:
        sequence = sequences[i]
        shared = _common(sequence, sequences[before]) if before >= 0 else 0
        if before >= 0:
            ends[columns[before][shared:]] = size
        fresh = np.arange(size, size + len(sequence) - shared)
        columns[i] = np.concatenate([columns[before][:shared], fresh]) if shared else fresh
        ids.append(sequence[shared:].astype(np.int64))
        positions.append(np.arange(shared, len(sequence)))
        size += len(fresh)
        before = i
    ends[columns[before]] = size
    return _Tree(np.concatenate(ids), np.concatenate(positions), ends[:size], columns)


def prefix_shared(sequences: Sequence[TokenSequence], groups: Sequence[int]) -> Layout:
    """One row per group; within it every shared prefix is computed once and each token sees exactly its own path.

    `groups[s]` tells which sequences belong together."""
    members: dict[int, list[int]] = {}
    for s, group in enumerate(groups):
        members.setdefault(group, []).append(s)
    trees = [_tree([_used(sequences[s]) for s in inside]) for inside in members.values()]
    length = max(len(t.ids) for t in trees)
    ids_RL = np.zeros((len(trees), length), np.int64)
    positions_RL = np.zeros((len(trees), length), np.int64)
    # Padding sees itself: a row without a single key would give NaN.
    ends_RL = np.tile(np.arange(1, length + 1), (len(trees), 1))
    where: list[tuple[int, Int]] = [(0, np.zeros(0, np.int64))] * len(sequences)
    for row, (tree, inside) in enumerate(zip(trees, members.values(), strict=True)):
        n = len(tree.ids)
        ids_RL[row, :n], positions_RL[row, :n] = tree.ids, tree.positions
        ends_RL[row, :n] = tree.ends
        for s, columns in zip(inside, tree.columns, strict=True):
            where[s] = (row, columns)
    return _layout(sequences, ids_RL, where, sum(len(t.ids) for t in trees), positions_RL, ends_RL)


def tree_sizes(sequences: Sequence[TokenSequence]) -> tuple[int, int]:
    """Tokens of one group laid out one by one, and as a prefix tree."""
    used = [_used(s) for s in sequences]
    return sum(len(u) for u in used), len(_tree(used).ids)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Sequences that go through the model together; `indices` are their places in the step's batch."""

    indices: tuple[int, ...]
    layout: Layout


Packing = Literal["auto", "prefix", "padded"]


@dataclass(frozen=True)
class Cost:
    """What a forward and backward pass costs, in floating point operations, to choose a layout."""

    per_token: float = 1.0
    per_pair: float = 0.0
    """For each query and key of a row, over all layers."""

    @classmethod
    def of(cls, parameters: int, layers: int, width: int) -> Cost:
        """Of a LoRA step: `parameters` without embeddings take no gradient of their own; `width` is heads times head
        dimension. Attention was measured to run at nearly twice the rate of the linear layers on CPU."""
        return cls(4.0 * parameters, 8.0 * layers * width)


_CAUSAL = 0.75
"""Of a row's pairs, those that a causal kernel computes: half, and what its blocks waste."""


def sharing_pays(sequences: Sequence[TokenSequence], groups: Sequence[int], cost: Cost) -> bool:
    """Whether prefix trees cost less than padded rows: fewer tokens, but one long row with a dense mask per group."""
    members: dict[int, list[TokenSequence]] = {}
    for sequence, group in zip(sequences, groups, strict=True):
        members.setdefault(group, []).append(sequence)
    rows = sum(len(s.ids) * cost.per_token + _CAUSAL * len(s.ids) ** 2 * cost.per_pair for s in sequences)
    trees = 0.0
    for inside in members.values():
        size = tree_sizes(inside)[1]
        trees += size * cost.per_token + size**2 * cost.per_pair
    return trees < 0.95 * rows


def micro_batches(
    sequences: Sequence[TokenSequence],
    groups: Sequence[int],
    budget: int,
    packing: Packing,
    cost: Cost = Cost(),
) -> list[MicroBatch]:
    """The batch cut into passes of at most about `budget` tokens, padding counted; a single sequence may exceed it."""
    if packing == "auto":
        packing = "prefix" if sharing_pays(sequences, groups, cost) else "padded"
    if packing == "prefix":
        return _prefix_batches(sequences, groups, budget)
    # Neighbours in length share a pass, so that little is padded.
    order = sorted(range(len(sequences)), key=lambda s: len(sequences[s].ids))
    out: list[MicroBatch] = []
    inside: list[int] = []
    for s in order:
        if inside and (len(inside) + 1) * len(sequences[s].ids) > budget:
            out.append(MicroBatch(tuple(inside), padded([sequences[i] for i in inside])))
            inside = []
        inside.append(s)
    out.append(MicroBatch(tuple(inside), padded([sequences[i] for i in inside])))
    return out


def _prefix_batches(
    sequences: Sequence[TokenSequence], groups: Sequence[int], budget: int
) -> list[MicroBatch]:
    """Groups go whole into a pass, cut only where one alone exceeds the budget."""
    members: dict[int, list[int]] = {}
    for s, group in enumerate(groups):
        members.setdefault(group, []).append(s)
    rows: list[tuple[int, list[int]]] = []
    for inside in members.values():
        # Sorted, so that the pieces of a group that is cut still share most.
        inside.sort(key=lambda s: sequences[s].ids.tolist())
        piece: list[int] = []
        size = 0
        for s in inside:
            used = _used(sequences[s])
            fresh = len(used) - (_common(used, _used(sequences[piece[-1]])) if piece else 0)
            if piece and size + fresh > budget:
                rows.append((size, piece))
                piece, size, fresh = [], 0, len(used)
            piece.append(s)
            size += fresh
        rows.append((size, piece))
    rows.sort(key=lambda r: r[0])
    out: list[MicroBatch] = []
    batch: list[tuple[int, list[int]]] = []
    for row in rows:
        if batch and (len(batch) + 1) * row[0] > budget:
            out.append(_prefix_batch(sequences, [r for _, r in batch]))
            batch = []
        batch.append(row)
    out.append(_prefix_batch(sequences, [r for _, r in batch]))
    return out


def _prefix_batch(sequences: Sequence[TokenSequence], rows: Sequence[Sequence[int]]) -> MicroBatch:
    indices = [s for row in rows for s in row]
    groups = [r for r, row in enumerate(rows) for _ in row]
    return MicroBatch(tuple(indices), prefix_shared([sequences[s] for s in indices], groups))
