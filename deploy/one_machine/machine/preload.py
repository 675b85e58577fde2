# SPDX-License-Identifier: Apache-2.0
"""Python programs that run in forks of the supervisor, which has loaded their modules once.

Why: each process of a cloud needs a second of CPU to load the same modules, and the forks share
the memory of these modules. A fork runs the code that the supervisor has loaded. If a file has
changed since then, ``is_current`` returns False, and the supervisor starts programs by their
commands.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path

from deploy.one_machine.machine import inside

#: Modules of the programs of a cloud. The scheduler's are missing, because numpy starts threads.
MODULES = (
    "compute_agent.service",
    "compute_agent.virt.memory.driver",
    "compute_api.compute.app",
    "compute_api.compute.service",
    "compute_api.image_gateway.service",
    "compute_api.metadata.service",
    "compute_api.placement.service",
    "conductor.service",
    "deploy.one_machine.services.identity.__main__",
    "deploy.one_machine.services.image.__main__",
    "deploy.one_machine.services.network.__main__",
    # The messaging library loads its driver by name.
    "oslo_messaging._drivers.impl_rabbit",
)
_PAUSE_SECONDS = 0.02
#: File or folder -> time of its last change when the modules were loaded, in ns.
_loaded: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class Entry:
    """What a fork of the supervisor runs in place of a program's command.

    Attributes:
        module: A module with a function ``main`` that reads ``sys.argv``.
        arguments: The command line without the name of the program.
        network: File of the network namespace that the process enters, or None.
        place: Arguments of ``inside.become``, as text, or nothing.
    """

    module: str
    arguments: list[str] = field(default_factory=list)
    network: str | None = None
    place: list[str] = field(default_factory=list)

    def enter(self) -> None:
        """Move this process into the namespaces of the program, if it has any.

        Raises:
            OSError, CalledProcessError: The namespaces cannot be entered or made.
        """
        if self.network is not None:
            inside.enter_network(Path(self.network))
        if self.place:
            network, host, boot_id, *hidden = self.place
            inside.become(Path(network), host, Path(boot_id), hidden)

    def run(self, title: str) -> None:
        """Run the program in this process with this title, which begins with the name to show.

        Raises:
            SystemExit: The program has ended.
        """
        # ./deploy/up imports this module before it installs libraries.
        import setproctitle

        setproctitle.setproctitle(title)
        sys.argv = [title.split()[0], *self.arguments]
        importlib.import_module(self.module).main()


class Fork:
    """A child process of this process, with the methods of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs. Minus the signal if killed."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return the exit status.

        Raises:
            TimeoutExpired: The process still runs after ``timeout`` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(_PAUSE_SECONDS)
        return status

    def terminate(self) -> None:
        """Send SIGTERM if the process runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def load() -> None:
    """Load ``MODULES`` into this process, for all later forks."""
    for name in MODULES:
        importlib.import_module(name)
    _loaded.update(_modification_times())
    # The collector would write to every object, and so end the sharing of its memory.
    gc.collect()
    gc.freeze()


def is_current() -> bool:
    """Return True if the modules are loaded, and neither their files nor the libraries changed."""
    return bool(_loaded) and all(
        _loaded.get(file, changed_at) == changed_at
        for file, changed_at in _modification_times().items()
    )


def _modification_times() -> dict[str, int]:
    """Return the times in ns of the last changes of loaded files, and of the folder of libraries.

    Files of libraries are left out, because an installation changes the folder. A file that is gone
    has the time 0.
    """
    libraries = sysconfig.get_path("purelib")
    foreign = (libraries, sysconfig.get_path("stdlib"))
    files = (getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
    times = {}
    for file in [libraries, *(file for file in files if file and not file.startswith(foreign))]:
        try:
            times[file] = os.stat(file).st_mtime_ns
        except FileNotFoundError:
            times[file] = 0
    return times
