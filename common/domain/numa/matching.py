# SPDX-License-Identifier: Apache-2.0
"""Bipartite matching: assigns to each request one of its options, each option at most once. Pure.

Used to assign host NUMA nodes to guest NUMA nodes, and devices to requests for devices. The
algorithm (augmenting paths) finds a matching if there is one. The cost is bounded by requests times
options, so no request can make it slow.
"""

from __future__ import annotations

from collections.abc import Sequence


def match(options: Sequence[Sequence[int]]) -> list[int] | None:
    """Return a different option for each request, or None if that is not possible.

    ``options`` contains a list of possible options for each request. Earlier options of a list are
    preferred.
    """
    holder: dict[int, int] = {}
    for request in range(len(options)):
        if not _serve(request, options, holder, set()):
            return None
    answer = {request: option for option, request in holder.items()}
    return [answer[request] for request in range(len(options))]


def _serve(
    request: int, options: Sequence[Sequence[int]], holder: dict[int, int], seen: set[int]
) -> bool:
    for option in options[request]:
        if option not in seen and option not in holder:
            holder[option] = request
            return True
    for option in options[request]:
        if option not in seen:
            seen.add(option)
            if _serve(holder[option], options, holder, seen):
                holder[option] = request
                return True
    return False
