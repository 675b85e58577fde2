# SPDX-License-Identifier: Apache-2.0
"""The files that ``kilonova join`` writes on a host: the agent's configuration, its keys, the
authority, its certificate; and whose they are.

Must stay true: a file is there as a whole, with its owner and mode, or as it was before.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.domain.errors import ConfigError
from common.service import config_file

Options = Mapping[str, Mapping[str, str]]  #: section -> option -> value
HEAD = "# Made by kilonova join. Every option: kilonova config sample\n"


@dataclass(frozen=True, slots=True)
class Owner:
    """A user of this machine; ``is_us``: who runs this, so that nothing has to be given away."""

    uid: int
    gid: int
    is_us: bool

    @classmethod
    def named(cls, name: str) -> Owner:
        """Raises ConfigError: there is none, or it cannot be given files by who runs this."""
        try:
            found = pwd.getpwnam(name)
        except KeyError as problem:
            raise ConfigError(
                f"there is no user {name}: install the agent's package, or its sysusers.d file "
                "(docs/hosts.md, Users and rights on a host); --user names another"
            ) from problem
        is_us = found.pw_uid == os.geteuid()
        if not is_us and os.geteuid() != 0:
            raise ConfigError(f"files of user {name} are made by root: run this as root")
        return cls(found.pw_uid, found.pw_gid, is_us)


def merged(path: Path, wanted: Options) -> str:
    """The text of a configuration file with these values in it; what else stands there stays.

    Raises:
        ConfigError: it has another value for one of them.
    """
    text = path.read_text() if path.exists() else HEAD
    known = (
        {(one.section, one.option): one.value for one in config_file.lines(str(path))}
        if path.exists()
        else {}
    )
    lines = text.splitlines()
    for section, options in wanted.items():
        missing = []
        for option, value in options.items():
            there = known.get((section, option))
            if there is None:
                missing.append(f"{option} = {value.replace('$', '$$')}")
            elif there != value:
                raise ConfigError(
                    f"{path} has [{section}] {option} = {there}, and this host is to have {value}: take the "
                    "line away, or let it say that"
                )
        if missing:
            _insert(lines, section, missing)
    return "\n".join(lines) + "\n"


def _insert(lines: list[str], section: str, new: list[str]) -> None:
    header = f"[{section}]"
    at = next((at for at, line in enumerate(lines) if line.strip() == header), None)
    if at is None:
        lines += [header, *new]
    else:
        lines[at + 1 : at + 1] = new
