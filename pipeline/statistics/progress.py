"""Whether the training reward moved, in a sentence, for `journeywork status` and the dashboard.

The groups that the first versions sampled are compared with those that the last versions sampled: a fifth of the
versions each (`SHARE`), at most `MOST_STEPS`. A group is one value, because its runs depend on each other."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pipeline.statistics.intervals import Sample

SHARE, MOST_STEPS = 5, 10


def first_and_last(rewards: Mapping[int, list[float]]) -> tuple[int, Sample, Sample]:
    """Return the number of steps from the first to the last version, and the samples of the first and last versions.

    `rewards`: the mean rewards of groups by the step that sampled them; at least one step, and none empty."""
    first, last = min(rewards), max(rewards)
    width = min(MOST_STEPS, (last - first) // SHARE + 1)
    begin = [value for step, values in rewards.items() if step < first + width for value in values]
    end = [value for step, values in rewards.items() if step > last - width for value in values]
    return last - first, Sample.of(begin), Sample.of(end)


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
