# SPDX-License-Identifier: Apache-2.0
"""The forms in which the ring newcomer tries the tree, and the visit that combined forms make.

A visit lists the commands of one container in their order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path


class Form(StrEnum):
    """A property of the place, of the caller or of the order of the commands."""

    CLONE = "clone"
    ARCHIVE = "archive"
    SPACE = "space"
    UMASK = "umask"
    BARE = "bare"
    BESIDE = "beside"
    TWICE = "twice"


EXPLANATIONS = {
    Form.CLONE: "a git clone below /root, with git installed (the default)",
    Form.ARCHIVE: "the files of the commit below /root, without .git and without git",
    Form.SPACE: "a path with a space",
    Form.UMASK: "umask 077, which also holds for the files of the tree",
    Form.BARE: "no terminal and no LANG: only PATH and HOME in the environment",
    Form.BESIDE: "the tests run beside a running ./deploy/up",
    Form.TWICE: "each command a second time",
}
#: The list of the tests that an archive may skip although a clone runs them.
ALLOWED = Path(__file__).with_name("only_in_a_clone.txt")
FOLDER, FOLDER_WITH_SPACE = "/root/kilonova", "/root/my cloud/kilonova"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BARE_ENVIRONMENT = {"PATH": PATH, "HOME": "/root"}
USUAL_ENVIRONMENT = {**BARE_ENVIRONMENT, "LANG": "C.UTF-8", "TERM": "xterm", "SHELL": "/bin/bash"}


@dataclass(frozen=True)
class Command:
    """A command of the README, and the name of its log."""

    log: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Visit:
    """The behaviour of one newcomer."""

    forms: frozenset[Form]
    tests: tuple[str, ...] = ()

    @property
    def has_git(self) -> bool:
        """True if git is installed and the tree is a clone."""
        return Form.ARCHIVE not in self.forms

    @property
    def folder(self) -> str:
        """The folder of the tree in the container."""
        return FOLDER_WITH_SPACE if Form.SPACE in self.forms else FOLDER

    @property
    def umask(self) -> int:
        """The umask of the caller and of the unpacked tree."""
        return 0o077 if Form.UMASK in self.forms else 0o022

    @property
    def has_terminal(self) -> bool:
        """True if the commands run in a terminal."""
        return Form.BARE not in self.forms

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the commands, without the variables of the network."""
        return BARE_ENVIRONMENT if Form.BARE in self.forms else USUAL_ENVIRONMENT

    @property
    def commands(self) -> tuple[Command, ...]:
        """The commands in their order. Tests are always last."""
        up, down = Command("up", ("./deploy/up",)), Command("down", ("./deploy/down",))
        test = Command("test", ("./deploy/test", *self.tests))
        repeats = (up, test) if Form.TWICE in self.forms else ()
        again = tuple(Command(f"{command.log}-again", command.words) for command in repeats)
        stop = () if Form.BESIDE in self.forms else (down,)
        return up, *again[:1], *stop, test, *again[1:]

    @property
    def name(self) -> str:
        """The forms in their order, as the name of a folder."""
        return "-".join(form for form in Form if form in self.forms)


def plan_visit(words: Collection[str], tests: Sequence[str] = ()) -> Visit:
    """Return the visit of these forms.

    Args:
        words: names of forms. Without clone and archive, the tree is a clone.
        tests: arguments of the ./deploy/test inside the container.

    Raises:
        ValueError: a word is not a form, or clone and archive are combined.
    """
    unknown = [word for word in words if word not in {*map(str, Form)}]
    if unknown:
        raise ValueError(f"These are not forms: {' '.join(unknown)}. Forms: {' '.join(Form)}.")
    forms = {Form(word) for word in words}
    if {Form.CLONE, Form.ARCHIVE} <= forms:
        raise ValueError("A tree is a clone or an archive, not both: run the ring once for each.")
    source = set() if Form.ARCHIVE in forms else {Form.CLONE}
    return Visit(frozenset(chain(forms, source)), tuple(tests))


def read_names(lines: Iterable[str]) -> set[str]:
    """Return the tests of a list with one test, a tab and its reason in each line."""
    return {line.split("\t")[0] for line in lines if line.strip() and not line.startswith("#")}


def find_archive_only(archive: set[str], clone: set[str], allowed: set[str]) -> list[str]:
    """Return the sorted tests that only the archive skips, without allowed exceptions."""
    return sorted(archive - clone - allowed)
