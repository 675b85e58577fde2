# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.fault_matrix.processes.victim NAME MODULE``: run a product process with seams.

The program runs ``main`` of MODULE in a child process, and starts the child again after a kill, as
systemd would. A restart is quick because the program has imported all modules before. The folder of
the orders is KILONOVA_FAULTS. While it contains NAME.down, the child stays off. The child leads its
own process group, and a kill ends the whole group.
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
#: Modules that the product imports late, by role.
LATE = {
    "api": ("compute_api.compute.app", "compute_api.http.authentication", "common.rpc.agent"),
    "agent": ("compute_agent.virt.memory.driver",),
}


def main() -> None:
    name, module = sys.argv[1:]
    folder = Folder(Path(os.environ["KILONOVA_FAULTS"]))
    for imported_module in (
        module,
        *seams.MODULES[seams.read_role(name)],
        *LATE.get(seams.read_role(name), ()),
    ):
        importlib.import_module(imported_module)
    ending: list[bool] = []

    def end(number: int, frame: FrameType | None) -> None:
        ending.append(True)
        if pid := folder.read_pid(name):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    while not ending:
        if folder.is_off(name):
            # The host has no power.
            time.sleep(PAUSE_SECONDS)
            continue
        pid = os.fork()
        if pid == 0:
            run_product(name, module, folder)
        (folder.path / f"{name}.pid").write_text(f"{pid}\n")
        os.waitpid(pid, 0)
        (folder.path / f"{name}.pid").unlink(missing_ok=True)
        if not ending:
            # systemd restarts a process after a pause.
            time.sleep(PAUSE_SECONDS)


def run_product(name: str, module: str, folder: Folder) -> None:
    """Become the product's process, in the child after the fork."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = [f"kilonova-{seams.read_role(name)}"]
    try:
        seams.install(name, folder)
        importlib.import_module(module).main()
    finally:
        sys.stdout.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
