# SPDX-License-Identifier: Apache-2.0
"""The helper that makes bridges, as systemd would start it, in a thread."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from compute_agent.privileged import bridges
from compute_agent.privileged.bridges import BridgeHelper


def helper_of(folder: Path) -> BridgeHelper:
    """The way to one that serves from now on, until the tests end."""
    path = folder / "bridges.socket"
    where = socket.socket(socket.AF_UNIX)
    where.bind(str(path))
    where.listen()
    threading.Thread(target=bridges.serve, args=(where,), daemon=True).start()
    return BridgeHelper(path)
