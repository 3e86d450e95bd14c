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


def split_overlapping(
    sizes: Sequence[int], context: int, room: int, smallest: int, overlap: int
) -> list[range]:
    """Split a list into subsets that fit uncut into `room`, each together with the common text of size `context`.

    A subset has at least `smallest` members, even if they do not fit, and shares `overlap` members with its
    neighbour. A member that would be cut in the smallest subset too counts as what it would get there, because fewer
    neighbours would not help it. The common text counts as half of the room at most. Return the subsets as ranges of
    indices."""
    count = len(sizes)
    context = min(context, room // 2)
    sizes = [min(s, (room - context) // smallest) for s in sizes]
    if count <= smallest or context + sum(sizes) <= room:
        return [range(count)]
    out: list[range] = []
    start = 0
    while not out or out[-1].stop < count:
        stop = min(start + smallest, count)
        while stop < count and context + sum(sizes[start : stop + 1]) <= room:
            stop += 1
        out.append(range(start, stop))
        start = stop - overlap
    if len(out[-1]) < smallest:
        out[-1] = range(count - smallest, count)
    return out
