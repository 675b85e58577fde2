# SPDX-License-Identifier: Apache-2.0
"""Run the bridge helper in a thread, on a socket as from systemd."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from compute_agent.privileged import bridges
from compute_agent.privileged.bridges import BridgeHelper


def start_helper(folder: Path) -> BridgeHelper:
    """Start a bridge helper that serves until the test process ends, and return a client."""
    path = folder / "bridges.socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    threading.Thread(target=bridges.serve, args=(listener,), daemon=True).start()
    return BridgeHelper(path)
