# SPDX-License-Identifier: Apache-2.0
"""What the commands say while they work: numbered steps, and on failure what to do next.

Used by deploy/commands. Plain lines, flushed at once, so that they read the same on a terminal and
in the log of a CI. Every failure that an operator can cause or cure is a ``Failure``; anything else
is a bug and keeps its traceback.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

UMASK = 0o077  #: what the commands make is root's alone


class Failure(Exception):
    """Something that the operator can put right: what failed, and what to do about it."""

    def __init__(self, what: str, todo: str) -> None:
        super().__init__(f"{what}\n{todo}")
        self.what = what
        self.todo = todo


def say(text: str = "") -> None:
    """One line, at once."""
    print(text, flush=True)


def steps(
    table: Sequence[tuple[str, Callable[[], str | None]]], first: int = 1, total: int | None = None
) -> None:
    """Run the steps in order: ``[3/14] title …``; what a step returns stands below it.

    Raises:
        Failure: of the step that failed, named in it.
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
    """Run a command's ``work`` and turn a Failure into words on stderr and the status 1."""
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
    """Run a program without input and return its output.

    Raises:
        Failure: it is missing, ended with an error or took longer than ``timeout`` seconds; with
        the last
            lines of what it said, and the given advice.
    """
    # which a root made by su may lack
    path = os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"
    try:
        done = subprocess.run(
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
        raise Failure(f"There is no program {command[0]}.", todo) from problem
    except subprocess.TimeoutExpired as problem:
        raise Failure(f"{command[0]} did not end within {timeout:.0f} s.", todo) from problem
    output = done.stdout.decode(errors="replace")
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(log, "a", opener=private) as file:
            file.write(f"$ {' '.join(map(str, command))}\n{output}\n")
    if done.returncode != 0:
        tail = "\n".join("  | " + line for line in output.strip().splitlines()[-15:])
        raise Failure(
            f"{' '.join(map(str, command[:4]))} … ended with {done.returncode}:\n{tail}",
            todo + (f" All of its output: {log}" if log else ""),
        )
    return output


def private(path: str, flags: int) -> int:
    """Opens a file of root's alone, for ``open``; never through a symbolic link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def wait(
    condition: Callable[[], bool],
    seconds: float,
    what: str,
    todo: str | Callable[[], str],
    pause: float = 0.2,
) -> None:
    """Ask until the condition holds; ``todo`` may be worked out at the end, from what has been
    logged by then.

    Raises:
        Failure: it did not within that many seconds.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Failure(
                f"{what} (waited {seconds:.0f} s).", todo if isinstance(todo, str) else todo()
            )
        time.sleep(pause)
