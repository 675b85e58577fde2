# SPDX-License-Identifier: Apache-2.0
"""The files that ``kilonova join`` writes on a host, and their owner.

These are the agent's configuration, its keys, the authority and the certificate.

Invariant: a file is replaced as a whole, with owner and mode, or stays as it was.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from oslo_config import iniparser

from common.domain.errors import ConfigError
from common.service import config_file

Options = Mapping[str, Mapping[str, str]]  #: section -> option -> value
HEAD = "# Made by kilonova join. Every option: kilonova config sample\n"
#: The password in a URL, which no message shows.
_PASSWORD = re.compile(r"(?<=:)[^:@/]+(?=@)")


@dataclass(frozen=True, slots=True)
class Owner:
    """A user of this machine. ``is_us`` is True for the user that runs the command."""

    uid: int
    gid: int
    is_us: bool

    @classmethod
    def named(cls, name: str) -> Owner:
        """Return the user of this machine with this name.

        Raises:
            ConfigError: There is no such user, or this process is neither root nor that user.
        """
        try:
            entry = pwd.getpwnam(name)
        except KeyError as problem:
            raise ConfigError(
                f"there is no user {name}: install the agent's package or its sysusers.d file (docs/hosts.md, Users "
                "and rights on a host), or give another user with --user"
            ) from problem
        is_us = entry.pw_uid == os.geteuid()
        if not is_us and os.geteuid() != 0:
            raise ConfigError(
                f"only root can create files of user {name}: run this command as root"
            )
        return cls(entry.pw_uid, entry.pw_gid, is_us)


def merged(path: Path, required: Options, head: str = HEAD, replaceable: str = "") -> str:
    """Return the text of the configuration file ``path``, with missing options of ``required``.

    All other lines stay. No file is written.

    Args:
        path: The file, which need not exist.
        required: section -> option -> value.
        head: The first line of a new file.
        replaceable: A text of the file that counts as no file.

    Raises:
        ConfigError: The file is malformed, or has another value for an option in ``required``.
    """
    if path.exists() and path.read_text() != replaceable:
        text, present = path.read_text(), read_options(path)
    else:
        text, present = head, {}
    lines = text.splitlines()
    for section, options in required.items():
        missing = []
        for option, value in options.items():
            current, escaped_value = present.get((section, option)), value.replace("$", "$$")
            if current is None:
                missing.append(f"{option} = {escaped_value}")
            elif current not in (value, escaped_value):
                shown, needed = (_PASSWORD.sub("***", text) for text in (current, value))
                raise ConfigError(
                    f"{path} has [{section}] {option} = {shown}, but this machine needs {needed}: remove or correct "
                    "the line"
                )
        if missing:
            _insert(lines, section, missing)
    return "\n".join(lines) + "\n"


def read_options(path: Path) -> dict[tuple[str, str], str]:
    """Return (section, option) -> value of a configuration file.

    Raises:
        ConfigError: The file is malformed.
    """
    try:
        lines = config_file.lines(str(path))
    except iniparser.ParseError as problem:
        raise ConfigError(f"{path}: {problem}. Correct the line, or remove the file") from problem
    return {(line.section, line.option): line.value for line in lines}


def _insert(lines: list[str], section: str, new: list[str]) -> None:
    header = f"[{section}]"
    at = next((at for at, line in enumerate(lines) if line.strip() == header), None)
    if at is None:
        lines += [header, *new]
    else:
        lines[at + 1 : at + 1] = new
