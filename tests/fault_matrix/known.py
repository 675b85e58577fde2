# SPDX-License-Identifier: Apache-2.0
"""Cells that need a word: those that cannot be, and those that are known to fail.

Both are in the figure: a waived cell in its footnote, a failing one as failed.
"""

from __future__ import annotations

#: Part of an id -> why there is no such cell. At most one in a hundred.
WAIVED: dict[str, str] = {}
#: Id -> why it fails, and what would mend it. Not run in the default set.
KNOWN: dict[str, str] = {
    "attach_volume/attach/undo-refused": (
        "the host could not attach the volume and does not let go of it: the volume is in error, the doctor names "
        "it (volume-in-error), and its user removes it from the server"
    ),
    "evacuate/revive/undo-kill-mid": (
        "the agent dies before it has started the guest again, and its host is still forced down, so that nobody "
        "waits for it: the server is STOPPED, as it is, and its user starts it"
    ),
    "evacuate/then/evacuate": (
        "the second ends the first, which had placed the server elsewhere; it fails, since that host is up, and "
        "the guest kept at the first host belongs to no open migration until the server is deleted"
    ),
}

#: Id -> the defect that the cell has found, which is mended. Run in the default set at each commit.
FOUND: dict[str, str] = {
    "create/networks/service-does-it-late": (
        "a port that the network service made after its creation was given up and repeated stayed"
    ),
    "attach_volume/reserve/service-does-it-late": "the same of an attachment of a volume",
    "migrate/move_volumes/service-does-it-late": "the same where a server moves with its volumes",
    "remove_security_group/change/conductor-kill-mid": (
        "a group that was removed before a crash was not found any more, and the action failed"
    ),
    "revert_here/restart/undo-refused": (
        "a guest that could not be started again left its server in ERROR and its resize waiting for an end"
    ),
    "live_migrate/migrate/agent-kill-mid": (
        "a driver in memory that was killed while it gave a guest up had it twice"
    ),
    "live_migrate/migrate/hypervisor-restarts": "the same, when its hypervisor was restarted",
    "detach_volume/detach/host-gone": (
        "a volume that was detached while its host was dead was still in the guest that started there afterwards"
    ),
    "detach_share/detach/host-gone": "the same of shares",
}


def waived(cell: str) -> str:
    """Why the cell with this id is waived; empty: it is not."""
    return next((why for part, why in WAIVED.items() if part in cell), "")
