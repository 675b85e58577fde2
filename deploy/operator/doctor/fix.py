# SPDX-License-Identifier: Apache-2.0
"""``kilonova doctor --fix ID``: runs the remedy of a finding.

Rows are repaired in one transaction that checks again (``deploy.operator.doctor.remedies``).
Conductors do the work on hosts and in external services. A guest without a record is adopted or
discarded by the commands for that, which query all hosts first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.domain import errors
from common.store.engine import Connection, Store
from deploy.operator.doctor import Finding, remedies
from deploy.operator.doctor.kinds import KINDS, Mender

#: Called with the name of the host and the id of the server. Returns the command's exit status.
GuestCommand = Callable[[str, str], int]


@dataclass(frozen=True)
class GuestCommands:
    """The commands that adopt and discard a guest."""

    adopt: GuestCommand
    discard: GuestCommand


def guest_commands(config: str | None) -> GuestCommands:
    """Return ``kilonova host adopt`` and ``kilonova host discard`` as functions of host and server.

    They run with ``--yes``, and return the exit status.

    Args:
        config: Path of the configuration file, or None for the default.
    """
    # Imported here because they load the API, which every other use of the doctor does without.
    from deploy.operator.hosts import adopt as host_adopt
    from deploy.operator.hosts import discard as host_discard

    def options(host: str, server: str) -> argparse.Namespace:
        unset = dict.fromkeys(("name", "project", "user", "flavor", "image"))
        return argparse.Namespace(
            config=config, host=host, server=server, yes=True, force=False, replace=False, **unset
        )

    return GuestCommands(
        lambda host, server: host_adopt.adopt(options(host, server)),
        lambda host, server: host_discard.discard(options(host, server)),
    )


def fix(
    store: Store,
    names: Sequence[str],
    findings: Sequence[Finding],
    look: Callable[[Connection], Sequence[Finding]],
    commands: GuestCommands,
) -> int:
    """Repair these findings, and print the outcomes. Return 1 if a repair failed, else 0.

    A name that is not among the current findings needs no repair.

    Args:
        store: The database.
        names: Ids of the findings to repair.
        findings: The current findings.
        look: Returns the findings of a new check in the given transaction.
        commands: Adopt and discard a guest without a record.
    """
    refused = 0
    for name in names:
        finding = next((candidate for candidate in findings if candidate.id == name), None)
        if finding is None:
            print(
                f"{name}: nothing to repair, there is no such finding; kilonova doctor lists them"
            )
            continue
        try:
            done = _repair(store, finding, look, commands)
        except errors.Problem as problem:
            print(f"{name}: {problem}")
            refused += 1
            continue
        remedy = KINDS[finding.kind].remedy
        print(f"{name}: {remedy}" if done else f"{name}: nothing to repair any more")
    return 1 if refused else 0


def _repair(
    store: Store,
    finding: Finding,
    look: Callable[[Connection], Sequence[Finding]],
    commands: GuestCommands,
) -> bool:
    if KINDS[finding.kind].way is not Mender.GUEST:
        return store.write(lambda tx: remedies.mend(tx, finding, look))
    unrecorded_hosts = store.read(lambda tx: remedies.unknown_at(tx, finding))
    for host in unrecorded_hosts:
        is_spare = store.read(lambda tx: remedies.is_spare(tx, finding, look))
        if (commands.discard if is_spare else commands.adopt)(host, finding.subject):
            raise errors.Conflict(
                f"The guest of {finding.subject} on host {host} was neither adopted nor discarded; see the lines above."
            )
    return bool(unrecorded_hosts)
