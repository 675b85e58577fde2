# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.fault_matrix.processes.victim NAME MODULE``: keep the product's ``main`` of a
module running in a child, with the seams of ``seams`` in it.

As systemd would, it starts the child again when it was killed; since it has imported everything
before, that takes a moment. KILONOVA_FAULTS is the folder of the orders; while it has NAME.down,
the child stays off. The child is the first of its process group, which dies with it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from tests.fault_matrix.processes import seams
from tests.fault_matrix.processes.orders import Folder

PAUSE_SECONDS, PR_SET_PDEATHSIG = 0.2, 1
#: What the API's worker imports where it needs it.
LATE = {
    "api": ("compute_api.compute.app", "compute_api.http.authentication", "common.rpc.agent"),
    "agent": ("compute_agent.virt.memory.driver",),
}


def main() -> None:
    name, module = sys.argv[1:]
    folder = Folder(Path(os.environ["KILONOVA_FAULTS"]))
    for one in (module, *seams.MODULES[seams.role(name)], *LATE.get(seams.role(name), ())):
        importlib.import_module(one)
    ending: list[bool] = []

    def end(number: int, frame: FrameType | None) -> None:
        ending.append(True)
        if pid := folder.pid(name):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    while not ending:
        if folder.is_off(name):
            time.sleep(PAUSE_SECONDS)  # a host without power
            continue
        pid = os.fork()
        if pid == 0:
            become(name, module, folder)
        (folder.path / f"{name}.pid").write_text(f"{pid}\n")
        os.waitpid(pid, 0)
        (folder.path / f"{name}.pid").unlink(missing_ok=True)
        if not ending:
            time.sleep(PAUSE_SECONDS)  # as systemd does


def become(name: str, module: str, folder: Folder) -> None:
    """In the child: be the product's process."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = [f"kilonova-{seams.role(name)}"]
    try:
        seams.install(name, folder)
        importlib.import_module(module).main()
    finally:
        sys.stdout.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
