# SPDX-License-Identifier: Apache-2.0
"""The requests that may wait, and the number of threads for them.

A request to a server may wait for another action of the server, for a step of its own action, or
for the server's host. Such requests have separate threads, so that they do not delay lists and
other requests. Requests for assisted snapshots, hypervisors and console tokens can wait too, but
their paths name no server, so they use the other threads.
"""

from __future__ import annotations

import re

#: Number of threads for requests that may wait, per other thread of the process.
PER_THREAD = 4
_TO_A_SERVER = re.compile(r"/servers/[^/]+/.")


def may_wait(path: str) -> bool:
    """Return whether requests to this path may wait: True for paths below the path of a server.

    For example, /servers/{id}/action, but not /servers/{id}.
    """
    return _TO_A_SERVER.search(path) is not None
