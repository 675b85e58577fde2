# SPDX-License-Identifier: Apache-2.0
"""``./deploy/test mutations [-- ID ...]``: remove one protection at a time, and run its tests.

A mutation counts as killed if a test fails with the mutation and passes without it. All changes are
made in a copy of the tree.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutations import ROOT, Mutation, OutOfDate, read_mutations

#: The longest time for the tests of one mutation.
MOST_SECONDS = 900
#: The status of pytest if a test failed.
FAILED = 1
REPLAY = "./deploy/test mutations --"
#: Builds in the project's folder. Hidden entries there are environments and caches, except .ci.
BUILDS = ("build", "dist", "__pycache__", "*.egg-info")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a mutation.

    Attributes:
        mutation: The mutation.
        word: "killed", "survived", "unclear" or "out of date".
        by: The failed test, or another reason for the outcome.
        seconds: Duration of the tests.
    """

    mutation: Mutation
    word: str
    by: str
    seconds: float


def main() -> int:
    """Run the mutations of the command line, by default all, and return 1 if any was not killed."""
    parser = argparse.ArgumentParser(prog=REPLAY)
    parser.add_argument("id", nargs="*", help="these mutations only")
    options = parser.parse_args()
    chosen = [
        mutation for mutation in read_mutations() if not options.id or mutation.id in options.id
    ]
    if unknown := {*options.id} - {mutation.id for mutation in chosen}:
        parser.error(f"there is no mutation {', '.join(sorted(unknown))}")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="kn-mutations-") as folder:
        copy_tree(Path(folder))
        for number, mutation in enumerate(chosen, 1):
            outcome = run_mutation(mutation, Path(folder))
            outcomes.append(outcome)
            print(
                f"[{number}/{len(chosen)}] {mutation.id:<30} {outcome.word:<12} "
                f"{outcome.seconds:4.0f} s  {outcome.by}",
                flush=True,
            )
    not_killed = [outcome for outcome in outcomes if outcome.word != "killed"]
    print(f"\n{len(outcomes) - len(not_killed)} of {len(outcomes)} mutations killed")
    for outcome in not_killed:
        mutation = outcome.mutation
        print(
            f"{outcome.word}: {mutation.id}: {mutation.protects} "
            f"(decision {mutation.decision}, {mutation.file})"
        )
        print(f"    {REPLAY} {mutation.id}")
    return 1 if not_killed else 0


def copy_tree(folder: Path) -> None:
    """Copy the project's files into this folder, without environments, caches and builds."""

    def list_ignored(parent: str, names: list[str]) -> set[str]:
        if Path(parent) != ROOT:
            return {"__pycache__"}.intersection(names)
        hidden = {name for name in names if name.startswith(".") and name != ".ci"}
        return hidden | shutil.ignore_patterns(*BUILDS)(parent, names)

    shutil.copytree(ROOT, folder, ignore=list_ignored, symlinks=True, dirs_exist_ok=True)


def run_mutation(mutation: Mutation, folder: Path) -> Outcome:
    """Apply a mutation to this copy of the tree, and run its tests.

    If a test fails or pytest stops early, run the same again without the mutation.
    """
    start = time.monotonic()
    try:
        with apply_mutation(mutation, folder):
            status, failed_test = run_pytest(folder, mutation.tests, mutation.k)
    except OutOfDate as problem:
        return Outcome(mutation, "out of date", str(problem), 0)
    if status == FAILED and failed_test:
        word, by = "killed", failed_test
        if run_pytest(folder, [failed_test], "")[0] != 0:
            word, by = "unclear", f"{failed_test} also fails without the mutation"
    elif status == 0:
        word, by = "survived", ""
    elif status is None:
        word, by = "killed", f"the tests do not end within {MOST_SECONDS} s"
    elif run_pytest(folder, mutation.tests, mutation.k)[0] == 0:
        word, by = "killed", f"pytest stops early with status {status}"
    else:
        word, by = (
            "unclear",
            f"pytest ends with status {status}, and also fails without the mutation",
        )
    return Outcome(mutation, word, by, time.monotonic() - start)


@contextmanager
def apply_mutation(mutation: Mutation, folder: Path) -> Iterator[None]:
    """Change the file of a mutation for the block, and restore it afterwards."""
    path = folder / mutation.file
    text, stat = path.read_text(), path.stat()
    path.write_text(mutation.apply_to(text))
    # A new modification time makes Python ignore the compiled file of the old text.
    os.utime(path, (stat.st_atime, stat.st_mtime + 7))
    try:
        yield
    finally:
        path.write_text(text)
        os.utime(path, (stat.st_atime, stat.st_mtime))


def run_pytest(folder: Path, tests: Sequence[str], k: str) -> tuple[int | None, str]:
    """Run tests until the first failure.

    Returns:
        The status of pytest, or None after ``MOST_SECONDS``, and the failed test, or "".
    """
    choice = ["-k", k] if k else []
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--no-header", "--tb=no"]
    try:
        process = subprocess.run(
            [*command, "-p", "no:cacheprovider", *tests, *choice],
            cwd=folder,
            env={**os.environ, "KILONOVA_TEST": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    words = ("FAILED ", "ERROR ")
    lines = [line for line in process.stdout.splitlines() if line.startswith(words)]
    return process.returncode, lines[0].split(" ", 1)[1].split(" - ")[0] if lines else ""


if __name__ == "__main__":
    sys.exit(main())
