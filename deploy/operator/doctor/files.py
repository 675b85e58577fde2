# SPDX-License-Identifier: Apache-2.0
"""Files that hosts have of servers without a guest, and that nothing explains."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy.engine import Connection

from common.store.views import host_files
from common.store.views.host_files import StrayFiles
from deploy.operator.doctor.finding import Finding


def compare_files(asked: Mapping[str, Collection[str]], tx: Connection) -> list[Finding]:
    """The files that hosts say they have without a guest (host -> servers), against the records;
    those that were not ``asked``, or did not answer, have reported theirs before."""
    found = {(server, host) for host, servers in asked.items() for server in servers}
    found |= {(server, host) for server, host in host_files.list_reported(tx) if host not in asked}
    return [_finding(one) for one in host_files.stray(tx, found)]


def _finding(one: StrayFiles) -> Finding:
    if one.is_spare:
        why = f"is on host {one.place}" if one.place else "was deleted"
        return Finding(
            "files-known",
            one.server,
            f"host {one.host} has files of it and no guest, and the server {why}",
            "files-elsewhere",
            (one.host,),
        )
    return Finding(
        "files-known",
        one.server,
        f"host {one.host} has files of it and no guest, and no record says where its guest is: they may be all "
        f"that is left of it. To have them removed: kilonova host discard {one.host} {one.server}",
        "files-of-nobody",
        (one.host,),
    )
