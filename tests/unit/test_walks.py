# SPDX-License-Identifier: Apache-2.0
"""``every_pair``, the order of actions in tests/e2e/test_action_pairs.py."""

from __future__ import annotations

from itertools import pairwise, product

from tests.e2e.walks import every_pair


def test_walk_of_every_pair_contains_each_pair_of_actions_once() -> None:
    actions = ["a", "b", "c", "d"]
    for seed in range(5):
        walk = every_pair(actions, seed)
        assert sorted(pairwise(walk)) == sorted(product(actions, repeat=2))
    assert len({tuple(every_pair(actions, seed)) for seed in range(5)}) > 1
