# SPDX-License-Identifier: Apache-2.0
"""Sequences of actions that contain every ordered pair of actions."""

from __future__ import annotations

import random
from collections.abc import Sequence


def every_pair(actions: Sequence[str], seed: int) -> list[str]:
    """Return a closed walk in which each action is followed once by each action, including itself.

    The walk ends with its first action. Another seed gives another order, and so other triples.
    """
    dice = random.Random(seed)
    successors = {action: dice.sample(actions, len(actions)) for action in actions}
    path, walk = [dice.choice(actions)], []
    # Hierholzer's algorithm
    while path:
        if successors[path[-1]]:
            path.append(successors[path[-1]].pop())
        else:
            walk.append(path.pop())
    return walk[::-1]
