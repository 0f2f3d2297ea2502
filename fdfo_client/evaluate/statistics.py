"""The two formulas of an evaluation."""

from __future__ import annotations

import math
from statistics import NormalDist

CONFIDENCE = 0.95


def wilson_interval(num_right: int, num_total: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of a share, both ends from 0 to 1; (0, 1) where nothing was tried."""
    if num_total == 0:
        return 0.0, 1.0
    z2 = NormalDist().inv_cdf((1 + confidence) / 2) ** 2
    share, scale = num_right / num_total, 1 + z2 / num_total
    centre = share + z2 / (2 * num_total)
    reach = math.sqrt(z2 * (share * (1 - share) + z2 / (4 * num_total)) / num_total)
    # Rounding may put an end a hair past the share it holds, at 0 and at 1.
    return max(0.0, min(share, (centre - reach) / scale)), min(1.0, max(share, (centre + reach) / scale))


def mcnemar_p(num_only_first: int, num_only_second: int) -> float:
    """The two-sided exact p of McNemar's test, from the pairs where only the first and only the second was right.

    If both are equally good, such a pair falls to either side with probability 1/2.
    """
    num_pairs = num_only_first + num_only_second
    tail = sum(math.comb(num_pairs, count) for count in range(min(num_only_first, num_only_second) + 1))
    return float(min(1.0, 2 * tail / (1 << num_pairs)))
