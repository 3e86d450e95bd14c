"""Below which mean logprob an apprentice's answer is not shown, so that those which are shown agree with its master's.

Every threshold of a fixed list is tested, and the lowest that passes is taken. A threshold passes if it is refused that
an answer above it agrees with a probability below `quality`: by the exact binomial tail of the pairs above it, at
`alpha` divided by the number of thresholds. Whatever the thresholds have in common, the one that is taken is wrong with
a probability of at most `alpha` (union bound). The list is fixed before any pair is seen: A. N. Angelopoulos, S. Bates,
E. J. Candès, M. I. Jordan and L. Lei (2021), "Learn then test", section 3.

The pairs have to be drawn like the calls that follow: independent of each other, and of calls that the apprentice was
not trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from store.evidence.comparison import Cascade

THRESHOLDS = tuple(-0.001 * 1.35**power for power in range(32))
"""From the one that the fewest answers reach, -0.001, to -11."""


def find_threshold(pairs: Sequence[tuple[float, bool]], quality: float, alpha: float = 0.05) -> Cascade | None:
    """Return the cascade that shows the most answers, `None` if no threshold passes. `pairs`: of each, the mean logprob
    of the apprentice's answer, and whether it agrees with the master's."""
    passed = None
    for least in THRESHOLDS:
        shown = [agrees for logprob, agrees in pairs if logprob >= least]
        if _binomial_tail(len(shown), sum(shown), quality) <= alpha / len(THRESHOLDS):
            passed = Cascade(
                min_logprob=least, quality=quality, alpha=alpha, pairs=len(pairs), shown=len(shown), agreed=sum(shown)
            )
    return passed


def _binomial_tail(count: int, agreed: int, quality: float) -> float:
    """Return the probability that `agreed` or more of `count` answers agree, if each does so with `quality`."""
    logs = (
        math.lgamma(count + 1)
        - math.lgamma(k + 1)
        - math.lgamma(count - k + 1)
        + k * math.log(quality)
        + (count - k) * math.log1p(-quality)
        for k in range(agreed, count + 1)
    )
    return min(math.fsum(map(math.exp, logs)), 1.0)
