"""How a prompt's room is shared: everything that fits stays whole, what is long gets what is left."""

from __future__ import annotations

from collections.abc import Sequence


def shares(sizes: Sequence[int], room: int) -> list[int]:
    """The room that each of `sizes` gets. What needs less than an equal share gets what it needs, and what it leaves goes to
    the others, so that nothing is cut while there is room to spare."""
    out = [0] * len(sizes)
    left = max(room, 0)
    ascending = sorted(range(len(sizes)), key=lambda i: sizes[i])
    for place, index in enumerate(ascending):
        out[index] = min(sizes[index], left // (len(sizes) - place))
        left -= out[index]
    return out


def pieces(sizes: Sequence[int], context: int, room: int, smallest: int, overlap: int) -> list[range]:
    """Indices of the list in pieces whose members fit, uncut and with what all share (`context`), into `room`.

    A piece has at least `smallest` members, whether they fit or not, and neighbours have `overlap` members in common. What is
    so long that it would be cut in the smallest piece too counts as what it would get there: fewer neighbours would not help
    it. A context counts as half of the room at most."""
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
