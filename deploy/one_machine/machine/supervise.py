# SPDX-License-Identifier: Apache-2.0
"""Keep processes running without systemd:
``python -m deploy.one_machine.machine.supervise FOLDER``.

FOLDER/processes.json lists them in the order of their start; FOLDER/NAME.pid says where each is;
while FOLDER/NAME.down exists it is kept stopped; one that holds the word "kill" stops it as a power
cut does. A process that died is started again, at once the first time and then ever later, up to 10
s; what it left in its process group is killed first, so that it finds its port free. TERM stops all
in reverse order; HUP reads the list again. All end with the supervisor, however it ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FIRST_PAUSE, LONGEST_PAUSE, GOOD_RUN = 0.2, 10.0, 30.0  # seconds
LOOK, LOG_LIMIT = 0.2, 50 * 1024 * 1024
PR_SET_PDEATHSIG, KILL = 1, "kill"
UMASK = 0o077  # of all that it starts, unless they set another
WAITED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@dataclass(frozen=True, slots=True)
class Program:
    """One process: ``grace`` is how many seconds it has to end before it is killed."""

    name: str
    command: list[str]
    log: str
    cwd: str
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    grace: float = 15.0


def write(folder: Path, programs: list[Program]) -> None:
    """Write the list for a supervisor of this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "processes.json.new"
    part.touch(mode=0o600)
    part.write_text(json.dumps([asdict(program) for program in programs], indent=1))
    part.replace(folder / "processes.json")


def read(folder: Path) -> list[Program]:
    """The list as it was written."""
    return [Program(**item) for item in json.loads((folder / "processes.json").read_text())]


class Supervised:
    """One program and, while it runs, its process."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program = program
        self._pid_file = folder / f"{program.name}.pid"
        self._down = folder / f"{program.name}.down"
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._not_before = 0.0
        self._pause = 0.0

    def look(self, moment: float) -> None:
        """Bring it to what is wanted: note a death, stop it, start it."""
        if self._process is not None and self._process.poll() is not None:
            self._handle_exit(moment)
        if self._down.exists():
            if self._process is not None and self._down.read_text() == KILL:
                self._clear_group()
            self.stop()
            self._pause = self._not_before = 0.0
        elif self._process is None and moment >= self._not_before:
            self._start(moment)

    def stop(self) -> None:
        """End it: TERM, and KILL to its group when the grace is over."""
        self.ask()
        self.end()

    def ask(self) -> None:
        """Send TERM."""
        if self._process is not None:
            self._process.terminate()

    def end(self) -> None:
        """Wait for the end, and make it."""
        if self._process is None:
            return
        try:
            self._process.wait(self.program.grace)
        except subprocess.TimeoutExpired:
            say(f"{self.program.name} did not end within {self.program.grace:.0f} s and is killed")
        self._clear_group()
        self._process.wait()
        self._process = None
        self._pid_file.unlink(missing_ok=True)
        say(f"{self.program.name} stopped")

    def _handle_exit(self, moment: float) -> None:
        assert self._process is not None
        good = moment - self._started >= GOOD_RUN
        self._pause = (
            FIRST_PAUSE if good or not self._pause else min(LONGEST_PAUSE, self._pause * 2)
        )
        self._not_before = moment + self._pause
        say(
            f"{self.program.name} ended with {self._process.returncode}, again in {self._pause:.1f} s; "
            f"see {self.program.log}"
        )
        self._clear_group()
        self._process = None
        self._pid_file.unlink(missing_ok=True)

    def _clear_group(self) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def _start(self, moment: float) -> None:
        program, self._started = self.program, moment
        log = Path(program.log)
        if log.exists() and log.stat().st_size > LOG_LIMIT:
            log.replace(log.with_suffix(".log.1"))
        user: dict[str, Any] = (
            {}
            if program.user is None
            else {"user": program.user, "group": program.user, "extra_groups": []}
        )
        try:
            with log.open("ab") as out:
                self._process = subprocess.Popen(
                    program.command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    cwd=program.cwd,
                    env=program.env,
                    start_new_session=True,
                    preexec_fn=_prepare_child,
                    **user,
                )
        except OSError as problem:
            self._pause = min(LONGEST_PAUSE, max(FIRST_PAUSE, self._pause * 2))
            self._not_before = moment + self._pause
            say(f"{program.name} cannot be started: {problem}")
            return
        self._pid_file.write_text(f"{self._process.pid}\n")
        say(f"{program.name} started as {self._process.pid}")


def _prepare_child() -> None:
    """In the child, before its program: end with the supervisor, take signals again."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def say(text: str) -> None:
    """One line of the supervisor's own log."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


def supervise(folder: Path) -> None:
    """Until TERM or INT."""
    processes = [Supervised(program, folder) for program in read(folder)]
    while True:
        moment = time.monotonic()
        for process in processes:
            process.look(moment)
        received = signal.sigtimedwait(WAITED, LOOK)
        if received is None:
            continue
        if received.si_signo in (signal.SIGTERM, signal.SIGINT):
            break
        if received.si_signo == signal.SIGHUP:
            processes = _reload(processes, folder)
    for _, alike in itertools.groupby(reversed(processes), key=_process_kind):
        asked = list(alike)
        for process in asked:
            process.ask()
        for process in asked:
            process.end()


def _process_kind(process: Supervised) -> str:
    """What is alike is ended together: the agents of many hosts need not wait for one another."""
    return process.program.name.rstrip("-0123456789")


def _reload(processes: list[Supervised], folder: Path) -> list[Supervised]:
    """The new list: what is the same runs on, what changed or went is stopped, what is new
    starts."""
    programs = read(folder)
    for process in reversed(processes):
        if process.program not in programs:
            process.stop()
    kept = {process.program.name: process for process in processes if process.program in programs}
    return [kept.get(program.name) or Supervised(program, folder) for program in programs]


def main() -> int:
    """Hold the folder's lock, so that there is one supervisor of it."""
    os.umask(UMASK)
    # before the lock tells others that they may signal
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITED)
    folder = Path(sys.argv[1]).resolve()
    with (folder / "supervise.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another supervisor has {folder}", file=sys.stderr)
            return 1
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        supervise(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
