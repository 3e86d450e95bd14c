"""Token sequences to micro-batches within a token budget, padded or with shared prefixes. `trainer.engine.passes` makes
a forward and backward pass over each.

A `Layout` says which tokens go through the model, which others each of them sees, and where the predictions for
the trained tokens come out. The loss gets logprobs of shape [S, K], whatever the layout. In a padded layout each
sequence is a row. With shared prefixes a row holds a group, or several that begin alike, and tokens that several of its
sequences begin with stand once, as in a trie.

Shape letters: S sequences, K most trained tokens in one of them, R rows, L row length, N trained tokens of the
layout, U distinct predictions of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from trainer.sequences import UNCUT, TokenSequence

T = TypeVar("T")
Int = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AttentionSpan:
    """How far back a layer's attention reaches, in positions along a sequence; 0 means no bound."""

    window: int = 0
    """Number of positions that a query sees, its own included."""
    chunk: int = 0
    """Length of a chunk; a query sees the positions of its own chunk only. Chunks are counted from position 0."""


FULL = AttentionSpan()


@dataclass(frozen=True, eq=False)
class Layout:
    """Tokens arranged for one forward pass."""

    ids_RL: torch.Tensor
    positions_RL: torch.Tensor | None
    """`None` stands for 0, 1, 2, … in every row."""
    ends_RL: torch.Tensor | None
    """For each column, the one after the last that sees it: a query q sees a key k where k <= q < ends[k]. `None` is
    causal attention."""
    rows_N: torch.Tensor
    cols_N: torch.Tensor
    """With `rows_N`: where in [R, L] the hidden state is that predicts a trained token."""
    targets_N: torch.Tensor
    temperatures_N: torch.Tensor
    sequence_N: torch.Tensor
    slot_N: torch.Tensor
    """With `sequence_N`: where in [S, K] a trained token belongs."""
    tokens: int
    """Number of tokens that go through the model, without padding."""
    cuts_N3: torch.Tensor | None = None
    """top_k, top_p and min_p under which each trained token was sampled. `None` where nothing was cut."""
    distinct_U: torch.Tensor | None = None
    """Indices among the N trained tokens, one of each prediction: replies that begin alike share the hidden states of
    their beginning, and the logits of each would be computed as often as there are such replies. `None`: all differ."""
    same_N: torch.Tensor | None = None
    """For each trained token, the index of its prediction in `distinct_U`."""
    images: tuple[tuple[bytes, ...], ...] = ()
    """For each row the files of its images, among them those of tokens that were cut off. Empty: no row has any."""

    def dense_mask(self, span: AttentionSpan = FULL) -> torch.Tensor | None:
        """`ends_RL` as a mask of shape [R, 1, L, L]: true where the query (third axis) sees the key (last axis).
        `None` for causal attention."""
        if self.ends_RL is None:
            return None
        at_L = torch.arange(self.ends_RL.shape[1], device=self.ends_RL.device)
        return torch.stack([self.seen(row, at_L, at_L, span) for row in range(len(self.ends_RL))]).unsqueeze(1)

    def seen(self, row: int, query_q: torch.Tensor, key_k: torch.Tensor, span: AttentionSpan = FULL) -> torch.Tensor:
        """Return whether the columns `query_q` of a row see its columns `key_k`: booleans, [q, k]. Only for a layout
        with `ends_RL`."""
        assert self.ends_RL is not None
        seen_qk = (query_q[:, None] >= key_k) & (query_q[:, None] < self.ends_RL[row, key_k])
        if self.positions_RL is not None and span != FULL:
            query_q1, key_1k = self.positions_RL[row, query_q][:, None], self.positions_RL[row, key_k]
            if span.window:
                seen_qk &= query_q1 - key_1k < span.window
            if span.chunk:
                seen_qk &= query_q1 // span.chunk == key_1k // span.chunk
        return seen_qk

    def to(self, device: torch.device) -> Layout:
        """The layout with its tensors on `device`."""
        return Layout(*(v.to(device) if isinstance(v, torch.Tensor) else v for v in vars(self).values()))


def used_ids(sequence: TokenSequence) -> npt.NDArray[np.int32]:
    """Return the ids that go through the model: up to the one that predicts the last trained token."""
    return sequence.ids[: int(np.flatnonzero(sequence.loss_mask)[-1])]


def _layout(
    sequences: Sequence[TokenSequence],
    ids_RL: Int,
    where: Sequence[tuple[int, Int]],
    tokens: int,
    positions_RL: Int | None = None,
    ends_RL: Int | None = None,
) -> Layout:
    """Return the layout of some rows. `where[s]`: the row of sequence s, and the column of each of its used tokens
    (`used_ids`). The other parameters are fields of the layout."""
    trained = [np.flatnonzero(s.loss_mask) for s in sequences]
    counts = [len(at) for at in trained]
    pairs = list(zip(sequences, trained, strict=True))
    rows_N = np.repeat([row for row, _ in where], counts)
    cols_N = np.concatenate([columns[at - 1] for (_, columns), at in zip(where, trained, strict=True)])
    targets_N = np.concatenate([s.ids[at] for s, at in pairs])
    temperatures_N = np.concatenate([s.temperatures[at] for s, at in pairs])
    cuts_N3 = np.concatenate([np.tile(UNCUT, (len(at), 1)) if s.cuts is None else s.cuts[at] for s, at in pairs])

    def integers(values_N: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values_N.astype(np.int64))

    # A prediction: the hidden state, the token, and what it was sampled under.
    predictions = np.column_stack([rows_N, cols_N, targets_N, temperatures_N, cuts_N3]).astype(np.float64)
    _, distinct, same = np.unique(predictions, axis=0, return_index=True, return_inverse=True)
    shared = len(distinct) < len(predictions)

    return Layout(
        torch.from_numpy(ids_RL),
        None if positions_RL is None else torch.from_numpy(positions_RL),
        None if ends_RL is None else torch.from_numpy(ends_RL),
        integers(rows_N),
        integers(cols_N),
        integers(targets_N),
        torch.from_numpy(temperatures_N),
        integers(np.repeat(np.arange(len(sequences)), counts)),
        integers(np.concatenate([np.arange(n) for n in counts])),
        tokens,
        None if all(s.cuts is None for s in sequences) else torch.from_numpy(cuts_N3),
        torch.from_numpy(distinct) if shared else None,
        torch.from_numpy(same.reshape(-1)) if shared else None,
    )


def padded(sequences: Sequence[TokenSequence]) -> Layout:
    """Return a layout of one row per sequence, padded on the right, where causal attention does not see the padding."""
    used = [used_ids(s) for s in sequences]
    length = max(len(u) for u in used)
    ids_RL = np.zeros((len(used), length), np.int64)
    for row, ids in enumerate(used):
        ids_RL[row, : len(ids)] = ids
    where = [(row, np.arange(len(ids))) for row, ids in enumerate(used)]
    layout = _layout(sequences, ids_RL, where, sum(len(u) for u in used))
    return replace(layout, images=tuple(s.images for s in sequences) if any(s.images for s in sequences) else ())


@dataclass(eq=False)
class _Tree:
    """The sequences of a group as a prefix tree in one row: tokens that sequences share are laid out once."""

    size: int
    """Number of tokens."""
    positions: Int
    ends: Int
    """For each token, the column after the last token that continues it. Tokens come before those that continue them,
    and those are adjacent, so a token sees exactly the earlier tokens that have not ended."""
    columns: list[Int]
    """For each sequence the column of each of its tokens."""


def segments(ends: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """Return the segments of a row: adjacent columns that see the same columns before them, and each other causally.
    `ends` is a row of `ends_RL`. The padding at the end of a row, where each column sees itself alone, is one segment.

    A segment is its first column, the column after its last, and the indices of the segments that it sees; the last of
    these is its own index."""
    largest_end = list(accumulate(ends, max))
    padding = len(ends)
    while padding > 1 and ends[padding - 1] == padding and largest_end[padding - 2] < padding:
        padding -= 1
    bounds = list(pairwise(sorted({0, *(end for end in ends if end <= padding), len(ends)})))
    latest = [max(ends[start:stop]) for start, stop in bounds]
    return [
        (start, stop, [*(j for j in range(index) if latest[j] > start), index])
        for index, (start, stop) in enumerate(bounds)
    ]


def attended_pairs(ends: Sequence[int]) -> int:
    """Return the number of pairs of query and key that attention by segments computes. `ends` is a row of `ends_RL`."""
    row, columns = segments(ends), np.asarray(ends)
    # Of an earlier segment a branch sees the first columns, which it shares.
    return sum(
        (stop - start) * (stop - start + sum(int((columns[slice(*row[j][:2])] > start).sum()) for j in seen[:-1]))
        for start, stop, seen in row
    )


def common_prefix(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Return the length of the longest common prefix of two arrays."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _tree(sequences: Sequence[npt.NDArray[Any]]) -> _Tree:
    """Make the prefix tree of some sequences' ids. In sorted order, each sequence shares its longest prefix with the
    one before it, as in a trie of sorted words."""
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tolist())
    columns: list[Int] = [np.zeros(0, np.int64)] * len(sequences)
    positions = []
    ends = np.zeros(sum(map(len, sequences)), np.int64)
    size = 0
    previous = -1
    for i in order:
        sequence = sequences[i]
        shared = common_prefix(sequence, sequences[previous]) if previous >= 0 else 0
        if previous >= 0:
            ends[columns[previous][shared:]] = size
        new_columns = np.arange(size, size + len(sequence) - shared)
        columns[i] = np.concatenate([columns[previous][:shared], new_columns]) if shared else new_columns
        positions.append(np.arange(shared, len(sequence)))
        size += len(new_columns)
        previous = i
    ends[columns[previous]] = size
    return _Tree(size, np.concatenate(positions), ends[:size], columns)


def by_group(group_of: Sequence[int]) -> list[list[int]]:
    """Return the indices of each group's sequences; `group_of[s]` is the group of sequence s."""
    members: dict[int, list[int]] = {}
    for s, group in enumerate(group_of):
        members.setdefault(group, []).append(s)
    return list(members.values())


def prefix_shared(sequences: Sequence[TokenSequence], group_of: Sequence[int]) -> Layout:
    """Return a layout of one row per group, in which shared prefixes stand once and each token sees its own sequence
    only. If no row has branches, the layout is causal and needs no mask. The sequences must have no images.

    `group_of[s]` is the group of sequence s."""
    groups = by_group(group_of)
    trees = [_tree([used_ids(sequences[s]) for s in indices]) for indices in groups]
    length = max(t.size for t in trees)
    ids_RL = np.zeros((len(trees), length), np.int64)
    positions_RL = np.zeros((len(trees), length), np.int64)
    # Padding sees itself: attention over no key at all would give NaN.
    ends_RL = np.tile(np.arange(1, length + 1), (len(trees), 1))
    where: list[tuple[int, Int]] = [(0, np.zeros(0, np.int64))] * len(sequences)
    for row, (tree, indices) in enumerate(zip(trees, groups, strict=True)):
        positions_RL[row, : tree.size] = tree.positions
        ends_RL[row, : tree.size] = tree.ends
        for s, columns in zip(indices, tree.columns, strict=True):
            ids_RL[row, columns] = used_ids(sequences[s])
            where[s] = (row, columns)
    tokens = sum(t.size for t in trees)
    if all((t.ends == t.size).all() for t in trees):
        return _layout(sequences, ids_RL, where, tokens)
    return _layout(sequences, ids_RL, where, tokens, positions_RL, ends_RL)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Sequences that go through the model in one pass."""

    indices: tuple[int, ...]
    """Those of the sequences in the batch of the step."""
    layout: Layout
    is_filler: bool = False
    """Whether a process makes the pass only because other processes make one more. Its results do not count."""


Row = tuple[int, list[int]]
"""The number of tokens of a prefix tree, and the indices of its sequences."""
Packing = Literal["prefix", "padded"]


@dataclass(frozen=True)
class Cost:
    """The cost of a forward and backward pass in floating point operations, by which a layout is chosen."""

    per_token: float
    per_pair: float
    """Per pair of query and key in a row, summed over all layers."""

    @classmethod
    def of(cls, parameters: int, width: int) -> Cost:
        """Return the cost of a LoRA step. `parameters`: number of frozen parameters without embeddings; `width`: number
        of heads times the head dimension, summed over the layers."""
        # A token takes 2 operations a parameter forward and 2 backward, as the weights are frozen. On a CPU, attention
        # was measured to run at nearly twice the rate of the linear layers.
        return cls(4.0 * parameters, 8.0 * width)


_CAUSAL = 0.75
"""Share of a row's pairs that a causal kernel computes: half, and the waste of its blocks."""


@dataclass(frozen=True, kw_only=True)
class SharingLimits:
    """What may share a pass, and a row."""

    of_pass: int = sys.maxsize
    """Tokens up to which rows share a pass."""
    of_row: int = 0
    """Tokens up to which groups that begin alike share a row."""
    in_common: int = 16
    """Tokens that a group must have in common with the one before it to share its row: another part of a row has costs
    of its own."""


NO_SHARED_ROWS = SharingLimits()
"""Each group has a row of its own."""


def sharing_pays(
    sequences: Sequence[TokenSequence], group_of: Sequence[int], cost: Cost, limits: SharingLimits = NO_SHARED_ROWS
) -> bool:
    """Whether prefix trees cost at least 5 % less than padded rows: a tree has fewer tokens, and needs masks.
    `group_of[s]` is the group of sequence s."""
    rows = sum(len(s.ids) * cost.per_token + _CAUSAL * len(s.ids) ** 2 * cost.per_pair for s in sequences)
    trees = 0.0
    for _, indices in _prefix_rows(sequences, group_of, sys.maxsize, limits):
        tree = _tree([used_ids(sequences[s]) for s in indices])
        trees += tree.size * cost.per_token + attended_pairs(tree.ends.tolist()) * cost.per_pair
    return trees < 0.95 * rows


def micro_batches(
    sequences: Sequence[TokenSequence],
    group_of: Sequence[int],
    budget: int,
    packing: Packing,
    limits: SharingLimits = NO_SHARED_ROWS,
) -> list[MicroBatch]:
    """Divide the batch into passes of at most about `budget` tokens, padding included. A single sequence may exceed it.

    `group_of[s]` is the group of sequence s."""
    together = min(limits.of_pass, budget)
    if packing == "prefix":
        # A row without branches needs no mask, unless it shares its pass with one that has them.
        with_branches: dict[bool, list[Row]] = {False: [], True: []}
        for size, indices in _prefix_rows(sequences, group_of, budget, limits):
            with_branches[size > max(len(used_ids(sequences[s])) for s in indices)].append((size, indices))
        return [
            _prefix_batch(sequences, of_pass)
            for rows in with_branches.values()
            for of_pass in _within_budget(rows, together)
        ]
    passes = _within_budget(((len(sequence.ids), s) for s, sequence in enumerate(sequences)), together)
    return [MicroBatch(tuple(indices), padded([sequences[s] for s in indices])) for indices in passes]


def _within_budget(rows: Iterable[tuple[int, T]], budget: int) -> list[list[T]]:
    """Divide rows, given with their lengths, into passes of at most `budget` tokens with padding; a longer row is a
    pass of its own. Rows of similar length share a pass, so that there is little padding."""
    passes: list[list[T]] = []
    for length, row in sorted(rows, key=lambda r: r[0]):
        if passes and (len(passes[-1]) + 1) * length <= budget:
            passes[-1].append(row)
        else:
            passes.append([row])
    return passes


def _prefix_rows(
    sequences: Sequence[TokenSequence], group_of: Sequence[int], budget: int, limits: SharingLimits
) -> list[Row]:
    """Return the rows with shared prefixes. A row is a group, a part of a group whose tree exceeds the budget, or
    several groups that begin alike, as all runs of an agent with a system prompt do."""
    used = [used_ids(s) for s in sequences]
    # In sorted order, neighbours share most: groups, and the parts of a group that is cut.
    groups = [sorted(indices, key=lambda s: used[s].tolist()) for indices in by_group(group_of)]
    rows: list[Row] = []
    for group in sorted(groups, key=lambda indices: used[indices[0]].tolist()):
        for size, piece in _pieces(used, group, budget):
            if rows:
                last_size, last = rows[-1]
                common = common_prefix(used[last[-1]], used[piece[0]])
                joined = last_size + size - common
                if common >= limits.in_common and joined <= min(limits.of_row, limits.of_pass, budget):
                    rows[-1] = (joined, last + piece)
                    continue
            rows.append((size, piece))
    return rows


def _pieces(used: Sequence[npt.NDArray[np.int32]], indices: Sequence[int], budget: int) -> Iterator[Row]:
    """Yield a group's sequences, which are sorted, as one row, or as several where their tree exceeds the budget."""
    size, piece = 0, list[int]()
    for s in indices:
        new_tokens = len(used[s]) - (common_prefix(used[s], used[piece[-1]]) if piece else 0)
        if piece and size + new_tokens > budget:
            yield size, piece
            size, piece, new_tokens = 0, [], len(used[s])
        piece.append(s)
        size += new_tokens
    yield size, piece


def _prefix_batch(sequences: Sequence[TokenSequence], rows: Sequence[Sequence[int]]) -> MicroBatch:
    """Return the pass over some rows, which are given by the indices of their sequences."""
    indices = [s for row in rows for s in row]
    group_of = [r for r, row in enumerate(rows) for _ in row]
    return MicroBatch(tuple(indices), prefix_shared([sequences[s] for s in indices], group_of))
