"""Rows whose texts are nearly equal: MinHash (Broder, 1997) over runs of five words, compared by locality-sensitive
hashing."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

_WORDS = 5
_BANDS, _ROWS = 16, 4
"""With 16 bands of 4 hashes, two texts that share 0.9 of their runs of words meet in a band in all but 1 of 10^7
cases."""


def near_duplicates(texts: Sequence[str], least: float = 0.9) -> list[tuple[int, int, float]]:
    """Return the pairs of texts whose runs of words overlap by `least` or more (Jaccard), first index, second index and
    overlap. Of many equal texts, each is paired with the first only. The result depends on the texts alone."""
    shingles = [_shingles(text) for text in texts]
    rng = np.random.default_rng(0)
    # Multiply-shift hashing (Dietzfelbinger et al., 1997): the upper half of a product modulo 2^64.
    factors, offsets = rng.integers(0, 1 << 63, (2, _BANDS * _ROWS, 1), np.uint64) | np.uint64(1)
    signatures = [
        ((factors * np.fromiter(of_text, np.uint64) + offsets) >> np.uint64(32)).min(axis=1).tolist()
        for of_text in shingles
    ]
    overlaps = {}
    for pair in sorted(set(_meetings(signatures))):
        first, second = (shingles[i] for i in pair)
        overlap = len(first & second) / len(first | second)
        if overlap >= least:
            overlaps[pair] = overlap
    return [(a, b, overlap) for (a, b), overlap in overlaps.items()]


def _meetings(signatures: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    for band in range(_BANDS):
        buckets: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, signature in enumerate(signatures):
            buckets[tuple(signature[band * _ROWS : (band + 1) * _ROWS])].append(i)
        for bucket in buckets.values():
            equal: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for i in bucket:
                equal[tuple(signatures[i])].append(i)
            for same in equal.values():
                yield from ((same[0], i) for i in same[1:])
            yield from combinations(sorted(same[0] for same in equal.values()), 2)


def _shingles(text: str) -> frozenset[int]:
    words = text.lower().split()
    runs = {" ".join(words[i : i + _WORDS]) for i in range(max(len(words) - _WORDS + 1, 1))}
    return frozenset(int.from_bytes(hashlib.blake2b(r.encode(), digest_size=4).digest(), "big") for r in runs)
