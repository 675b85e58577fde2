# SPDX-License-Identifier: Apache-2.0
"""Files of servers on hosts that have no guest of the server, and that no record explains."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy.engine import Connection

from common.store.views import host_files
from common.store.views.host_files import StrayFiles
from deploy.operator.doctor.finding import Finding


def compare_files(answers: Mapping[str, Collection[str]], tx: Connection) -> list[Finding]:
    """Return a finding for each server and host with files, but no guest, of the server there.

    Files are left out if the server has a running action, or a guest record on the host or on a
    host with the same storage. For hosts that were not queried or did not answer, the last report
    is used.

    Args:
        answers: Host -> servers of which the host has files and no guest.
        tx: The transaction.
    """
    pairs = {(server, host) for host, servers in answers.items() for server in servers}
    pairs |= {
        (server, host) for server, host in host_files.list_reported(tx) if host not in answers
    }
    return [_finding(stray) for stray in host_files.stray(tx, pairs)]


def _finding(stray: StrayFiles) -> Finding:
    if stray.is_spare:
        location = f"is on host {stray.place}" if stray.place else "was deleted"
        return Finding(
            "files-known",
            stray.server,
            f"host {stray.host} has files of this server but no guest, and the server {location}",
            "files-elsewhere",
            (stray.host,),
        )
    return Finding(
        "files-known",
        stray.server,
        f"host {stray.host} has files of this server but no guest, and the server has no record. The files may be the "
        f"only copy. To remove them: kilonova host discard {stray.host} {stray.server}",
        "files-of-nobody",
        (stray.host,),
    )
