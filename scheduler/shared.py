# SPDX-License-Identifier: Apache-2.0
"""What many hosts have in common, kept once: a column of numbers stands in its place.

``scheduler.columns`` keeps facts, sets of traits, cells and devices so: they come as text, each text is understood
once, and a filter looks at each once however many hosts have it.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import numpy as np

from scheduler.snapshot import Numbers

T = TypeVar("T")


class Shared(Generic[T]):
    """Values that many hosts have in common, each made once and known by its number; 0 is what nobody has yet."""

    def __init__(self, make: Callable[[Any], T], nothing: T) -> None:
        self._make = make
        self._nothing = nothing
        self._numbers: dict[Hashable, int] = {}
        self.values: list[T] = [nothing]

    def number(self, key: Hashable) -> int:
        """The number of what is made of the key."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.values)
            self.values.append(self._make(key))
        return number

    def forget(self, column: Numbers) -> Numbers:
        """The column renumbered, values that it does not have let go."""
        if not column.size:
            return column
        used, renumbered = np.unique(column, return_inverse=True)
        places = {int(old): new for new, old in enumerate(used[used > 0], start=1)}
        self.values = [self._nothing, *(self.values[old] for old in places)]
        self._numbers = {key: places[number] for key, number in self._numbers.items() if number in places}
        return renumbered.astype(np.int64) + int(used[0] != 0)
