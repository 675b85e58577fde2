# SPDX-License-Identifier: Apache-2.0
"""Sequences of actions in which every pair of them stands in a row."""

from __future__ import annotations

import random
from collections.abc import Sequence


def every_pair(actions: Sequence[str], seed: int) -> list[str]:
    """A closed walk in which each action is once followed by each, itself too: its first action is
    its last. Another seed gives another order, so that other triples stand in a row."""
    drawn = random.Random(seed)
    left = {action: drawn.sample(actions, len(actions)) for action in actions}
    path, walk = [drawn.choice(actions)], []
    while path:  # Hierholzer's algorithm
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            walk.append(path.pop())
    return walk[::-1]
