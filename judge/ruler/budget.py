"""How the space of a prompt is shared between texts."""

from __future__ import annotations

from collections.abc import Sequence


def allocate(sizes: Sequence[int], room: int) -> list[int]:
    """Return how much of `room` each of `sizes` gets. Texts are cut only if they do not fit, and all cut texts get
    one length.

    A text that needs less than an equal share leaves the rest of it to the others."""
    out = [0] * len(sizes)
    left = max(room, 0)
    ascending = sorted(range(len(sizes)), key=lambda i: sizes[i])
    for place, index in enumerate(ascending):
        out[index] = min(sizes[index], left // (len(sizes) - place))
        left -= out[index]
    return out
