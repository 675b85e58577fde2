# SPDX-License-Identifier: Apache-2.0
"""Keep processes running without systemd.

``python -m deploy.one_machine.machine.supervise FOLDER [--preload]``

FOLDER/processes.json lists the programs in the order of their start. FOLDER/NAME.pid has the
process id. While FOLDER/NAME.down exists, the program is kept stopped. If this file contains the
word "kill", the stop is a SIGKILL, like a power cut.

With --preload the supervisor starts the programs of its first list, and then loads the modules of
deploy/one_machine/machine/preload.py. Later programs with an ``entry`` run in forks of it.

A process that died is started again, first after 0.2 s and then after pauses of up to 10 s. The
rest of the process group is killed before, so that the port is free. TERM stops all programs in
reverse order. HUP reads the list again. All processes end with the supervisor.
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

from deploy.one_machine.machine import inside, preload
from deploy.one_machine.machine.preload import Entry, Fork

FIRST_PAUSE, LONGEST_PAUSE, GOOD_RUN = 0.2, 10.0, 30.0  # seconds
LOOK, LOG_LIMIT = 0.2, 50 * 1024 * 1024
PR_SET_PDEATHSIG, KILL = 1, "kill"
# Of all started processes, unless they set another.
UMASK = 0o077
WAITED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run.

    Attributes:
        name: The name, unique in a folder.
        command: The command line.
        entry: What a fork of the supervisor runs in place of ``command``, or None.
        log: The path of the file for the output.
        cwd: The working directory.
        env: The whole environment.
        user: The user, or None for the supervisor's.
        grace: Seconds between SIGTERM and SIGKILL at a stop.
    """

    name: str
    command: list[str]
    log: str
    cwd: str
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    grace: float = 15.0
    entry: Entry | None = None


def write(folder: Path, programs: list[Program]) -> None:
    """Write processes.json, which the supervisor reads at its start and after SIGHUP."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "processes.json.new"
    part.touch(mode=0o600)
    part.write_text(json.dumps([asdict(program) for program in programs], indent=1))
    part.replace(folder / "processes.json")


def read(folder: Path) -> list[Program]:
    """Return the list of programs in processes.json of this folder."""
    programs = json.loads((folder / "processes.json").read_text())
    return [
        Program(**{**item, "entry": item["entry"] and Entry(**item["entry"])}) for item in programs
    ]


class BecomeProgram(BaseException):
    """Ends the supervisor's code in a fork, which then runs the program."""

    def __init__(self, program: Program) -> None:
        self.program = program


class Supervised:
    """A program and its process, if there is one."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program = program
        self._pid_file = folder / f"{program.name}.pid"
        self._down = folder / f"{program.name}.down"
        self._process: subprocess.Popen[bytes] | Fork | None = None
        self._started = self._not_before = 0.0
        self._pause = 0.0

    def look(self, moment: float) -> None:
        """Notice the end of the process, then stop or start the program if necessary.

        A program with a file NAME.down is stopped, at once with SIGKILL if the file contains the
        word "kill". Another program without a process is started once the pause after its last end
        or failed start is over.

        Args:
            moment: The present time.monotonic().
        """
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
        """Stop the program: SIGTERM to the process, and at its end SIGKILL to the process group.

        The SIGKILL comes after ``grace`` seconds at the latest.
        """
        self.ask()
        self.end()

    def ask(self) -> None:
        """Send SIGTERM, if the program runs."""
        if self._process is not None:
            self._process.terminate()

    def end(self) -> None:
        """Wait for the end of the process, kill the process group, and remove the pid file.

        A process that runs after ``grace`` seconds is killed. Without a process do nothing.
        """
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
            f"{self.program.name} ended with {self._process.returncode} and restarts in {self._pause:.1f} s; "
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
        try:
            self._process = self._fork() if self._can_fork() else self._execute()
        except OSError as problem:
            self._pause = min(LONGEST_PAUSE, max(FIRST_PAUSE, self._pause * 2))
            self._not_before = moment + self._pause
            say(f"{program.name} cannot be started, next try in {self._pause:.1f} s: {problem}")
            return
        self._pid_file.write_text(f"{self._process.pid}\n")
        say(f"{program.name} started as {self._process.pid}")

    def _can_fork(self) -> bool:
        return self.program.entry is not None and preload.is_current()

    def _fork(self) -> Fork:
        """Return the fork. In the fork itself, end the supervisor's code with BecomeProgram."""
        if pid := os.fork():
            return Fork(pid)
        raise BecomeProgram(self.program)

    def _execute(self) -> subprocess.Popen[bytes]:
        program = self.program
        user: dict[str, Any] = (
            {}
            if program.user is None
            else {"user": program.user, "group": program.user, "extra_groups": []}
        )
        with open(program.log, "ab") as out:
            return subprocess.Popen(
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


def _prepare_child() -> None:
    """Let this child process get SIGTERM at the end of the supervisor, and unblock its signals."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def run_program(program: Program) -> None:
    """Run a program with an entry in this process, which is a fork of the supervisor.

    Raises:
        SystemExit: The program has ended, or cannot start.
    """
    assert program.entry is not None
    os.setsid()
    _prepare_child()
    with open(os.devnull, "rb") as nothing, open(program.log, "ab") as out:
        for number, file in enumerate((nothing, out, out)):
            os.dup2(file.fileno(), number)
    os.chdir(program.cwd)
    os.environ.clear()
    os.environ.update(program.env)
    try:
        program.entry.enter()
    except (OSError, subprocess.CalledProcessError) as problem:
        sys.exit(f"{program.name} cannot start: {problem}. {inside.ADVICE}")
    program.entry.run(f"kilonova-{program.name} {program.env.get('KILONOVA_CONF', '')}")


def say(text: str) -> None:
    """Print a line with the time to stdout, which is the supervisor's own log."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


def supervise(folder: Path, is_loaded: bool = True) -> None:
    """Run the programs of a folder until SIGTERM or SIGINT, then stop them in reverse order.

    SIGHUP reads processes.json again. The caller has blocked these signals.

    Args:
        folder: The folder.
        is_loaded: False: load the modules of the programs after the start of the first programs.

    Raises:
        BecomeProgram: This process is a fork, which must run the program.
    """
    processes = [Supervised(program, folder) for program in read(folder)]
    while True:
        moment = time.monotonic()
        for process in processes:
            process.look(moment)
        if not is_loaded:
            _load()
            is_loaded = True
            continue
        received = signal.sigtimedwait(WAITED, LOOK)
        if received is None:
            continue
        if received.si_signo in (signal.SIGTERM, signal.SIGINT):
            break
        if received.si_signo == signal.SIGHUP:
            processes = _reload(processes, folder)
    for _, same_kind in itertools.groupby(reversed(processes), key=_process_kind):
        group = list(same_kind)
        for process in group:
            process.ask()
        for process in group:
            process.end()


def _load() -> None:
    """Load the modules of the programs. After a failure, programs start by their commands."""
    try:
        preload.load()
    except Exception as problem:  # noqa: BLE001 - The program itself shows the failure in its log.
        say(f"the modules of the programs cannot be loaded: {problem!r}")


def _process_kind(process: Supervised) -> str:
    """Return the program's name without the number of the host.

    Processes of one kind that follow each other in the list, for example all agents, stop in
    parallel.
    """
    return process.program.name.rstrip("-0123456789")


def _reload(processes: list[Supervised], folder: Path) -> list[Supervised]:
    """Read the list again, stop programs that are gone or changed, and return the new list.

    Unchanged programs run on. New and changed programs start with the next ``look``.
    """
    programs = read(folder)
    for process in reversed(processes):
        if process.program not in programs:
            process.stop()
    kept = {process.program.name: process for process in processes if process.program in programs}
    return [kept.get(program.name) or Supervised(program, folder) for program in programs]


def main() -> int:
    """Supervise the folder of the command line until SIGTERM or SIGINT, and return the exit status.

    The status is 1 if another supervisor holds the lock of the folder.
    """
    os.umask(UMASK)
    # Signals are blocked before the lock shows other processes that they may send some.
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITED)
    folder = Path(sys.argv[1]).resolve()
    with (folder / "supervise.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another supervisor runs for {folder}", file=sys.stderr)
            return 1
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        try:
            supervise(folder, is_loaded="--preload" not in sys.argv)
        except BecomeProgram as fork:
            program = fork.program
        else:
            return 0
    # Only a fork gets here. It has closed the lock file, so that the lock ends with the supervisor.
    run_program(program)
    return 0


if __name__ == "__main__":
    sys.exit(main())
