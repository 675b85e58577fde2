# SPDX-License-Identifier: Apache-2.0
"""Each of some askers gets something of its own, out of what it may have: a bipartite matching.

Pure. Guest NUMA nodes get host NUMA nodes, requests for devices get devices. Found by augmenting
paths: it is complete, and its cost is bounded by askers times offers, so nothing that is asked for
can make it search for long.
"""

from __future__ import annotations

from collections.abc import Sequence


def match(options: Sequence[Sequence[int]]) -> list[int] | None:
    """For each asker one of its options, none given twice, earlier ones preferred; None: not all
    can be served."""
    holder: dict[int, int] = {}
    for asker in range(len(options)):
        if not _serve(asker, options, holder, set()):
            return None
    answer = {asker: offer for offer, asker in holder.items()}
    return [answer[asker] for asker in range(len(options))]


def _serve(
    asker: int, options: Sequence[Sequence[int]], holder: dict[int, int], seen: set[int]
) -> bool:
    for offer in options[asker]:
        if offer not in seen and offer not in holder:
            holder[offer] = asker
            return True
    for offer in options[asker]:
        if offer not in seen:
            seen.add(offer)
            if _serve(holder[offer], options, holder, seen):
                holder[offer] = asker
                return True
    return False
