# SPDX-License-Identifier: Apache-2.0
"""``kilonova doctor --fix ID``: carries out the remedy of a finding.

Rows are mended in one transaction that looks again (``deploy.operator.doctor.remedies``); what
hosts and neighbours must do is left to conductors. A guest that no record knows is adopted or
discarded by the commands that do just that, after they have asked all hosts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.domain import errors
from common.store.engine import Connection, Store
from deploy.operator.doctor import Finding, remedies
from deploy.operator.doctor.kinds import KINDS, Mender

GuestCommand = Callable[[str, str], int]  #: of a host and a server; 0: it is done


@dataclass(frozen=True)
class GuestCommands:
    """What makes a server of a guest, and what has it removed."""

    adopt: GuestCommand
    discard: GuestCommand


def guest_commands(config: str | None) -> GuestCommands:
    """``kilonova host adopt`` and ``discard``, as an operator gives them who has seen the
    finding."""
    # Imported here because they load the API, which every other use of the doctor does without.
    from deploy.operator.hosts import adopt as host_adopt
    from deploy.operator.hosts import discard as host_discard

    def options(host: str, server: str) -> argparse.Namespace:
        unsaid = dict.fromkeys(("name", "project", "user", "flavor", "image"))
        return argparse.Namespace(
            config=config, host=host, server=server, yes=True, force=False, replace=False, **unsaid
        )

    return GuestCommands(
        lambda host, server: host_adopt.adopt(options(host, server)),
        lambda host, server: host_discard.discard(options(host, server)),
    )


def fix(
    store: Store,
    names: Sequence[str],
    found: Sequence[Finding],
    look: Callable[[Connection], Sequence[Finding]],
    commands: GuestCommands,
) -> int:
    """Mend these findings, of those that were ``found``; 1 when one could not be. What is not found
    needs nothing."""
    refused = 0
    for name in names:
        finding = next((one for one in found if one.id == name), None)
        if finding is None:
            print(f"{name}: nothing to mend; kilonova doctor shows what is")
            continue
        try:
            done = _mend(store, finding, look, commands)
        except errors.Problem as problem:
            print(f"{name}: {problem}")
            refused += 1
            continue
        remedy = KINDS[finding.kind].remedy
        print(f"{name}: {remedy}" if done else f"{name}: nothing to mend any more")
    return 1 if refused else 0


def _mend(
    store: Store,
    finding: Finding,
    look: Callable[[Connection], Sequence[Finding]],
    commands: GuestCommands,
) -> bool:
    if KINDS[finding.kind].way is not Mender.GUEST:
        return store.write(lambda tx: remedies.mend(tx, finding, look))
    unknown = store.read(lambda tx: remedies.unknown_at(tx, finding))
    for host in unknown:
        is_spare = store.read(lambda tx: remedies.is_spare(tx, finding, look))
        if (commands.discard if is_spare else commands.adopt)(host, finding.subject):
            raise errors.Conflict(
                f"The guest of {finding.subject} on host {host} is not mended; see above."
            )
    return bool(unknown)
