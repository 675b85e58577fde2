# SPDX-License-Identifier: Apache-2.0
"""``./deploy/test mutations [-- ID ...]``: take one protection away at a time, and demand a test
that fails.

A kill counts when the test that failed passes without the mutation. Everything happens in a copy of
the tree.
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

from tests.mutations import ROOT, Mutation, OutOfDate, every

MOST_SECONDS = 900  #: that the tests of one mutation take
FAILED = 1  #: status of pytest
REPLAY = "./deploy/test mutations --"
#: Builds in the project's folder. Hidden entries there are environments and caches, except .ci.
BUILDS = ("build", "dist", "__pycache__", "*.egg-info")


@dataclass(frozen=True)
class Outcome:
    """What became of a mutation: killed, survived, or that nobody can say."""

    mutation: Mutation
    word: str
    by: str
    seconds: float


def main() -> int:
    """Run those that are named, or all; 1 when one was not killed."""
    parser = argparse.ArgumentParser(prog=REPLAY)
    parser.add_argument("id", nargs="*", help="these mutations only")
    options = parser.parse_args()
    chosen = [one for one in every() if not options.id or one.id in options.id]
    if unknown := {*options.id} - {one.id for one in chosen}:
        parser.error(f"there is no mutation {', '.join(sorted(unknown))}")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="kn-mutations-") as folder:
        copy_tree(Path(folder))
        for number, one in enumerate(chosen, 1):
            outcome = judged(one, Path(folder))
            outcomes.append(outcome)
            print(
                f"[{number}/{len(chosen)}] {one.id:<30} {outcome.word:<12} {outcome.seconds:4.0f} s  {outcome.by}",
                flush=True,
            )
    left = [one for one in outcomes if one.word != "killed"]
    print(f"\n{len(outcomes) - len(left)} of {len(outcomes)} mutations killed")
    for outcome in left:
        about = outcome.mutation
        print(
            f"{outcome.word}: {about.id}: {about.protects} (decision {about.decision}, {about.file})"
        )
        print(f"    {REPLAY} {about.id}")
    return 1 if left else 0


def copy_tree(folder: Path) -> None:
    """Copy the project's files into this folder, without environments, caches and builds."""

    def ignored(parent: str, names: list[str]) -> set[str]:
        if Path(parent) != ROOT:
            return {"__pycache__"}.intersection(names)
        hidden = {name for name in names if name.startswith(".") and name != ".ci"}
        return hidden | shutil.ignore_patterns(*BUILDS)(parent, names)

    shutil.copytree(ROOT, folder, ignore=ignored, symlinks=True, dirs_exist_ok=True)


def judged(one: Mutation, folder: Path) -> Outcome:
    """Take the protection away in this copy of the tree, and run the tests that should miss it."""
    began = time.monotonic()
    try:
        with mutated(one, folder):
            status, failed = pytest(folder, one.tests, one.k)
    except OutOfDate as problem:
        return Outcome(one, "out of date", str(problem), 0)
    if status == FAILED and failed:
        word, by = "killed", failed
        if pytest(folder, [failed], "")[0] != 0:
            word, by = "unclear", f"{failed} fails without the mutation too"
    elif status == 0:
        word, by = "survived", ""
    elif status is None:
        word, by = "killed", f"its tests do not end within {MOST_SECONDS} s"
    elif pytest(folder, one.tests, one.k)[0] == 0:
        word, by = "killed", f"its tests do not come to their end: status {status} of pytest"
    else:
        word, by = "unclear", f"status {status} of pytest, without the mutation too"
    return Outcome(one, word, by, time.monotonic() - began)


@contextmanager
def mutated(one: Mutation, folder: Path) -> Iterator[None]:
    """The file without the protection. Its time changes: what was compiled of it is not used."""
    path = folder / one.file
    text, stat = path.read_text(), path.stat()
    path.write_text(one.applied(text))
    os.utime(path, (stat.st_atime, stat.st_mtime + 7))
    try:
        yield
    finally:
        path.write_text(text)
        os.utime(path, (stat.st_atime, stat.st_mtime))


def pytest(folder: Path, tests: Sequence[str], k: str) -> tuple[int | None, str]:
    """Run these tests until one fails; the status (None: no end) and the one that failed."""
    chosen = ["-k", k] if k else []
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--no-header", "--tb=no"]
    try:
        ended = subprocess.run(
            [*command, "-p", "no:cacheprovider", *tests, *chosen],
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
    lines = [line for line in ended.stdout.splitlines() if line.startswith(words)]
    return ended.returncode, lines[0].split(" ", 1)[1].split(" - ")[0] if lines else ""


if __name__ == "__main__":
    sys.exit(main())
