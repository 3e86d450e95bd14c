"""Whether the training reward moved, in a sentence, for `journeywork status` and the dashboard.

The groups that the first versions sampled are compared with those that the last versions sampled: a fifth of the
versions each (`SHARE`), at most `MOST_STEPS`. A group is one value, because its runs depend on each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the package of the SDK takes a while to import, and queries need only the two numbers
    from journeywork.statistics import Sample

SHARE, MOST_STEPS = 5, 10


def reward_text(steps: int, first: Sample, last: Sample) -> str:
    """Return "Training reward 0.410 to 0.800 over 39 steps (…)", with the 95 % interval of the difference."""
    if not steps:
        return f"Training reward {last.mean:.3f} in {last.count:,} groups; no later version has played."
    text = f"Training reward {first.mean:.3f} to {last.mean:.3f} over {steps:,} step{'s' if steps > 1 else ''}"
    low, high = last.difference(first)
    if not math.isfinite(low) or not math.isfinite(high):
        return f"{text} (too few groups for an interval)."
    verdict = "it rose" if low > 0 else "it fell" if high < 0 else "the difference may be chance"
    return f"{text} (95 % interval of the difference {low:+.3f} to {high:+.3f}: {verdict})."
