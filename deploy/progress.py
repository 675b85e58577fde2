# SPDX-License-Identifier: Apache-2.0
"""The output of the commands: numbered steps, and advice after a failure.

The commands in deploy/ use this module. Lines are plain and flushed at once, so that they look the
same on a terminal and in the log of a CI. A ``Failure`` is a problem that an operator can cause or
solve. Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

#: Everything that the commands create belongs to root alone.
UMASK = 0o077


class Failure(Exception):
    """A problem that the operator can solve.

    Attributes:
        what: The problem.
        todo: Advice for the operator.
    """

    def __init__(self, what: str, todo: str) -> None:
        super().__init__(f"{what}\n{todo}")
        self.what = what
        self.todo = todo


def say(text: str = "") -> None:
    """Print a line without buffering."""
    print(text, flush=True)


def steps(
    table: Sequence[tuple[str, Callable[[], str | None]]], first: int = 1, total: int | None = None
) -> None:
    """Run the steps in order, each with a line such as ``[3/14] title …``.

    Below the line follow the note that the step returns, and its duration if that is 1 s or more.

    Args:
        table: Title and function of each step.
        first: Number of the first step.
        total: The number after the slash. None: the number of the last step.

    Raises:
        Failure: A step failed. The message contains its number and title.
    """
    total = total or first - 1 + len(table)
    for number, (title, work) in enumerate(table, first):
        say(f"[{number}/{total}] {title} …")
        began = time.monotonic()
        try:
            note = work()
        except Failure as failure:
            raise Failure(
                f"Step {number} ({title}) failed: {failure.what}", failure.todo
            ) from failure
        took = time.monotonic() - began
        if note or took >= 1:
            say(f"        {note or 'done'} ({took:.1f} s)" if took >= 1 else f"        {note}")


def main(work: Callable[[], int]) -> int:
    """Run a command's ``work`` and return the exit status.

    A Failure is printed on stderr and returns 1. Ctrl-C returns 130.
    """
    try:
        return work()
    except Failure as failure:
        print(f"\n{failure.what}\nWhat to do: {failure.todo}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr, flush=True)
        return 130


def run(
    command: Sequence[str | Path],
    todo: str,
    *,
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 1800,
) -> str:
    """Run a program without input and return its output, stdout and stderr together.

    Args:
        command: The program and its arguments.
        todo: Advice for the operator if the program fails.
        log: The file to which the command and its output are appended after the program ends.
        env: More environment variables.
        cwd: The working directory.
        timeout: Seconds until the program is killed.

    Raises:
        Failure: The program is missing, ends with an error, or takes longer than ``timeout``. After
            an error the message contains the last lines of the output.
    """
    # A root shell of su may lack these folders.
    path = os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"
    try:
        result = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            cwd=cwd,
            check=False,
            env={**os.environ, "PATH": path, **(env or {})},
        )
    except FileNotFoundError as problem:
        raise Failure(f"The program {command[0]} is not installed.", todo) from problem
    except subprocess.TimeoutExpired as problem:
        raise Failure(f"{command[0]} did not end within {timeout:.0f} s.", todo) from problem
    output = result.stdout.decode(errors="replace")
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(log, "a", opener=private) as file:
            file.write(f"$ {' '.join(map(str, command))}\n{output}\n")
    if result.returncode != 0:
        tail = "\n".join("  | " + line for line in output.strip().splitlines()[-15:])
        raise Failure(
            f"{' '.join(map(str, command[:4]))} … ended with {result.returncode}:\n{tail}",
            todo + (f" All of its output: {log}" if log else ""),
        )
    return output


def private(path: str, flags: int) -> int:
    """Open a file for ``open(..., opener=private)``, and return the file descriptor.

    A new file gets the mode 0600.

    Raises:
        OSError: The path is a symbolic link, or cannot be opened.
    """
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def wait(
    condition: Callable[[], bool],
    seconds: float,
    what: str,
    todo: str | Callable[[], str],
    pause: float = 0.2,
) -> None:
    """Poll until the condition is true.

    Args:
        condition: Called until the result is True.
        seconds: The longest time to wait.
        what: The problem if the condition stays false, as the subject and verb of a sentence.
        todo: Advice, or a function that returns advice after the wait, for example from a log.
        pause: Seconds between two checks.

    Raises:
        Failure: The condition is still false after this many seconds.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Failure(
                f"{what} (waited {seconds:.0f} s).", todo if isinstance(todo, str) else todo()
            )
        time.sleep(pause)
