# SPDX-License-Identifier: Apache-2.0
"""Which requests may wait, and how many threads they have.

A request to a server may wait for another action of the server, for a step of its own action, or
for the server's host. Such requests have threads of their own, so that lists and other requests
are answered meanwhile.
"""

from __future__ import annotations

import re

PER_THREAD = 4  #: waiting threads of a process for each of its other threads
_TO_A_SERVER = re.compile(r"/servers/[^/]+/.")


def may_wait(path: str) -> bool:
    """True if requests for the path are made to one server."""
    return _TO_A_SERVER.search(path) is not None
