# SPDX-License-Identifier: Apache-2.0
"""``kilonova upgrade check``: what is left to do before or after an upgrade of the cloud.

Run the command of the new release, on a controller. Nothing is changed. Kilonova supports two
consecutive releases side by side.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import IntEnum

from oslo_config import cfg

from common import __version__
from common.domain import errors
from common.rpc.broker import address_of
from common.service import config
from common.store import upgrades
from common.store.engine import Store
from common.store.hosts import services
from common.store.rows import HeardServiceRow
from common.store.version import find_needed
from deploy.operator.hosts.broker_restore import (
    identities_of_hosts,
    identities_of_processes,
    is_made_by_up,
)
from deploy.operator.hosts.broker_users import Management
from deploy.operator.store import stuck_actions

#: The oldest release whose services may run beside this release: major and minor number.
OLDEST = (0, 1)
LONGEST = 20  # The number of names shown of a list.


class Level(IntEnum):
    """How serious a finding is. The highest level is the exit status of the command."""

    FINE = 0
    LEFT = 1  #: Something is left to do.
    REFUSED = 2  #: The cloud cannot be upgraded to this release in this state.


WORDS = {Level.FINE: "fine", Level.LEFT: "to do", Level.REFUSED: "not possible"}


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report."""

    level: Level
    text: str


def check(options: argparse.Namespace) -> int:
    """Print what is left to do. Return 0: nothing, 1: something, 2: the upgrade is not possible.

    Raises:
        ConfigError: The configuration has an option that this release does not accept.
        Problem: The database does not answer.
    """
    conf = config.load(options.config)
    worst = Level.FINE
    with closing(Store.open(conf)) as store:
        for finding in find(store, conf):
            worst = max(worst, finding.level)
            print(f"{WORDS[finding.level]}: {finding.text}")
    return int(worst)


def find(store: Store, conf: cfg.ConfigOpts) -> Iterator[Finding]:
    """Yield the findings of all checks. The services are checked after the database's upgrade."""
    yield Finding(Level.FINE, "this release accepts every option of the configuration")
    database = check_database(store)
    yield database
    if database.level is not Level.FINE:
        return
    yield from check_services(store.read(services.list_all))
    yield check_actions(store)
    yield check_broker(store, conf)


def check_database(store: Store) -> Finding:
    """Return whether the database has the version of this release."""
    found = upgrades.version(store)
    if found is None:
        return Finding(Level.LEFT, "the database is empty. Run: kilonova database upgrade")
    if found.is_too_new:
        return Finding(
            Level.REFUSED,
            f"a newer release has upgraded the database to version {found}, which this code cannot "
            "use. Install that release",
        )
    if found.is_too_old:
        return Finding(
            Level.LEFT,
            f"the database has version {found}, this release needs {find_needed()}. Make a backup "
            "(docs/backup.md), then run: kilonova database upgrade. Check again afterwards",
        )
    return Finding(
        Level.FINE, f"the database has version {found} and serves code from {found.usable_from}"
    )


def check_services(rows: Sequence[HeardServiceRow]) -> Iterator[Finding]:
    """Yield one finding for the services of each version, and one for silent services."""
    by_version: defaultdict[str | None, list[str]] = defaultdict(list)
    for row in rows:
        by_version[row.version].append(f"{row.binary} on {row.host}")
    for version, names in sorted(by_version.items(), key=lambda item: item[0] or ""):
        yield _check_version(version, names)
    if down := [f"{row.binary} on {row.host}" for row in rows if not row.up]:
        yield Finding(
            Level.LEFT,
            f"down: {_join(down)}. Start or remove each, because it may be of an old version",
        )


def _check_version(version: str | None, names: Sequence[str]) -> Finding:
    if version == __version__:
        return Finding(Level.FINE, f"{len(names)} services of version {version}")
    if version is None:
        return Finding(
            Level.LEFT,
            f"of an unknown version: {_join(names)}. 0.1.0 does not record its version. Upgrade each "
            "service, or restart it if it is upgraded",
        )
    if _release(version) < OLDEST:
        return Finding(
            Level.REFUSED,
            f"of version {version}: {_join(names)}. Only {'.'.join(map(str, OLDEST))} and later run "
            f"beside {__version__}. Upgrade each service to a release between first",
        )
    if _release(version) > _release(__version__):
        return Finding(Level.REFUSED, f"of version {version}, newer than this code: {_join(names)}")
    return Finding(
        Level.LEFT, f"of version {version}: {_join(names)}. Upgrade each service to {__version__}"
    )


def _release(version: str) -> tuple[int, ...]:
    """Return major and minor number: (0, 2) for "0.2.0.dev0"."""
    return tuple(int(part) for part in version.split(".")[:2])


def check_actions(store: Store) -> Finding:
    """Return whether stuck actions wait for an operator."""
    if stuck := store.read(lambda tx: stuck_actions.listed(tx, only_stuck=True)):
        return Finding(
            Level.LEFT, f"{len(stuck)} actions are stuck. Show them: kilonova action list --stuck"
        )
    return Finding(Level.FINE, "no action is stuck")


def check_broker(store: Store, conf: cfg.ConfigOpts) -> Finding:
    """Return whether the users at the broker have the rights that this release needs."""
    if is_made_by_up(conf):
        return Finding(Level.FINE, "./deploy/up gives the users at the broker their rights")
    remedy = "Run where a conductor runs: kilonova broker restore"
    if not (conf.host_keys.management_url and conf.host_keys.command_secret):
        return Finding(
            Level.LEFT,
            "the rights of the users at the broker are not checked, because [host_keys] "
            f"management_url or command_secret is not set. {remedy}",
        )
    users = [*identities_of_processes(conf), *identities_of_hosts(store, conf)]
    try:
        outdated = Management(conf.host_keys.management_url).users_without_rights(
            users, address_of(conf).virtual_host or "/"
        )
    except errors.Unavailable as problem:
        return Finding(Level.LEFT, f"the rights at the broker are not checked. {problem}")
    if outdated:
        return Finding(
            Level.LEFT,
            f"{len(outdated)} of {len(users)} users at the broker lack rights of this release: "
            f"{_join(outdated)}. {remedy}",
        )
    return Finding(Level.FINE, f"{len(users)} users at the broker have their rights")


def _join(names: Sequence[str]) -> str:
    more = f" and {len(names) - LONGEST} more" if len(names) > LONGEST else ""
    return ", ".join(names[:LONGEST]) + more
