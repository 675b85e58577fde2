# SPDX-License-Identifier: Apache-2.0
"""``./deploy/test newcomer [FORM ...]``: run the README's commands on an empty Debian.

The container is a minimal Debian without systemd, and the caller is root. The tree is the commit of
this checkout. Forms can be combined. The output ends with the counts of the last ./deploy/test in
the container.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.packages import ROOT
from deploy.progress import Failure, main, run, say
from tests.containers import ADVICE, RELEASES
from tests.newcomer import forms
from tests.newcomer.container import Container, start_container
from tests.newcomer.forms import Command, Form, Visit

BUILD = ROOT / "build/newcomer"
COUNTS = re.compile(r"^\d+ passed, .*\d+ skipped$", re.MULTILINE)
REASONS = re.compile(r"^ *\d+ skipped: .*$", re.MULTILINE)
#: The file in the container that gets the skipped tests.
SKIPPED = "/root/skipped"


@dataclass(frozen=True)
class Outcome:
    """The end of a command of the visit."""

    command: Command
    status: int
    seconds: float

    def __str__(self) -> str:
        return f"{' '.join(self.command.words)}: status {self.status} after {self.seconds:.0f} s"


def make_visit(arguments: Sequence[str]) -> int:
    """Parse the command line and make the visit."""
    options = _parse(arguments)
    try:
        visit = forms.plan_visit(options.forms, options.tests.split())
    except ValueError as problem:
        raise Failure(str(problem), "See ./deploy/test newcomer --help.") from problem
    title = (
        f"newcomer: {', '.join(form for form in Form if form in visit.forms)} on {options.release}"
    )
    folder = BUILD / f"{options.release}-{visit.name}"
    shutil.rmtree(folder, ignore_errors=True)
    say(f"{title}, with logs in {folder}")
    with start_container(BUILD, folder, options.release, visit) as machine:
        _copy_tree(machine)
        outcomes = list(_run_commands(machine))
        skipped = machine.read(SKIPPED)
    problems = [str(outcome) for outcome in outcomes if outcome.status != 0]
    if not problems and skipped is not None:
        problems = _compare(options.release, visit, skipped.splitlines())
    if not problems:
        shutil.rmtree(folder / "upper")
    log = (folder / f"{outcomes[-1].command.log}.log").read_text(errors="replace")
    say(f"\n{title}")
    for line in [*map(str, outcomes), *REASONS.findall(log)]:
        say(line)
    for problem in problems:
        say(f"FAILED: {problem}")
    if problems:
        say(f"The logs are in {folder}, the files of the container in {folder}/upper.")
    # With arguments of pytest, ./deploy/test prints no counts: count the commands instead.
    counts = f"{len(outcomes) - len(problems)} passed, {len(problems)} failed, 0 skipped"
    say(COUNTS.findall(log)[-1] if COUNTS.search(log) else counts)
    return min(len(problems), 1)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./deploy/test newcomer",
        description="Run ./deploy/up, ./deploy/down and ./deploy/test on an empty Debian.",
        epilog="\n".join(f"{form:10} {text}" for form, text in forms.EXPLANATIONS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("forms", nargs="*", metavar="FORM", help="one or more forms, see below")
    parser.add_argument("--release", choices=RELEASES, default=RELEASES[0])
    parser.add_argument("--tests", default="", help="arguments of ./deploy/test: --tests 'unit'")
    return parser.parse_args(arguments)


def _copy_tree(machine: Container) -> None:
    """Put the commit into the container, in the form of the visit.

    Raises:
        Failure: git is missing here or in the container's package sources.
    """
    visit, target = machine.visit, machine.path(machine.visit.folder)
    script = 'mkdir -p "$2" && git -C "$1" archive HEAD | tar -x --no-same-permissions -C "$2"'
    if visit.has_git:
        # git follows the link /proc/PID/root to this machine's own root, so it clones outside.
        script = (
            'git clone --quiet --no-local "$1" "$3" && mkdir -p "$2" '
            '&& tar -c -C "$3" . | tar -x -C "$2" && rm -r "$3"'
        )
        for words in (("update", "-q"), ("install", "-qy", "--no-install-recommends", "git")):
            if machine.run(Command("git", ("apt-get", *words)), "/root") != 0:
                raise Failure("git cannot be installed in the container.", ADVICE)
    target.parent.mkdir(parents=True, exist_ok=True)
    script = f"umask {visit.umask:o}\n{script}"
    copy = ["bash", "-euo", "pipefail", "-c", script, "copy", ROOT, target, machine.folder / "tree"]
    run(copy, "Run this in a clone.")
    if run(["git", "-C", ROOT, "status", "--porcelain", "--untracked-files=no"], ""):
        say("newcomer: the container gets no uncommitted changes of this tree")


def _run_commands(machine: Container) -> Iterator[Outcome]:
    """Run the commands of the visit until one fails."""
    for command in machine.visit.commands:
        start = time.monotonic()
        say(f"newcomer: {' '.join(command.words)} …")
        status = machine.run(command, machine.visit.folder, KILONOVA_TEST_SKIPPED=SKIPPED)
        yield Outcome(command, status, time.monotonic() - start)
        if status != 0:
            return


def _compare(release: str, visit: Visit, skipped: Sequence[str]) -> list[str]:
    """Compare an archive's skipped tests with those of the last clone.

    Returns:
        A sentence for each test that only the archive skips and the list does not allow.
    """
    name = "-".join(["skipped", release, *visit.tests]).replace("/", "_")
    clone = BUILD / f"{name}-clone"
    if visit.has_git:
        clone.write_text("".join(f"{line}\n" for line in skipped))
        return []
    if not clone.exists():
        say("newcomer: run the form clone, too, to compare the skipped tests")
        return []
    names = [forms.read_names(lines) for lines in (skipped, clone.read_text().splitlines())]
    surplus = forms.find_archive_only(
        *names, forms.read_names(forms.ALLOWED.read_text().splitlines())
    )
    return [f"an archive skips {test}, which a clone runs" for test in surplus]


if __name__ == "__main__":
    sys.exit(main(lambda: make_visit(sys.argv[1:])))
