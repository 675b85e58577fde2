# SPDX-License-Identifier: Apache-2.0
"""Cells that need a word: those that cannot be, and those that are known to fail.

Both are in the figure: a waived cell in its footnote, a failing one as failed.
"""

from __future__ import annotations

#: Part of an id -> why there is no such cell. At most one in a hundred.
WAIVED: dict[str, str] = {}
#: Id -> why it fails, and what would mend it. Not run in the default set.
KNOWN: dict[str, str] = {}

#: Id -> the defect that the cell found, which is mended. The default set runs each of these cells.
FOUND: dict[str, str] = {
    **{
        f"{workflow}/disconnect/undo-refused": (
            "a guest that its host did not describe with its volumes again ran without them"
        )
        for workflow in ("migrate", "resize", "revert_resize", "rebuild")
    },
    "attach_volume/attach/undo-refused": (
        "a volume that the host could neither attach nor let go of was nobody's to take back"
    ),
    "rebuild/reserve_volumes/undo-refused": (
        "volumes whose connection was refused on the way back stayed reserved, and the guest ran without them"
    ),
    "rebuild/connect_volumes/undo-refused": "the same, after the volume was written",
    "rebuild/connect_volumes/service-refuses": "the same, where the connection was refused first",
    "resize_here/remake/host-gone": (
        "the way back waited for ever for a host that was forced down, while too few were heard to judge by silence"
    ),
    "evacuate/revive/undo-kill-mid": (
        "nobody waited for a host that was heard again, as it was still forced down: its guest stayed off"
    ),
    "evacuate/then/evacuate": (
        "the second ended the first, which had placed the server on a host that is up, and failed: the guest "
        "kept at the dead host was lost sight of"
    ),
    "create/networks/service-does-it-late": (
        "a port that the network service made after its creation was given up and repeated stayed"
    ),
    "attach_interface/networks/service-does-it-late": "the same of a port for a running server",
    **{
        f"{step}/service-does-it-late": "the same of an attachment of a volume"
        for step in (
            "attach_volume/reserve",
            "attach_volume/connect",
            "create/volumes",
            "create/connect_volumes",
            "rebuild/reserve_volumes",
            "rebuild/await_reimage",
            "rebuild/connect_volumes",
            "swap_volume/connect",
            "unshelve/connect_volumes",
        )
    },
    **{
        f"{step}/service-does-it-late": "the same where a server moves with its volumes"
        for step in (
            "evacuate/move_volumes",
            "live_migrate/connect_there",
            "migrate/move_volumes",
            "resize/move_volumes",
            "revert_resize/move_volumes",
        )
    },
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
#: The same of a second fault that follows the first, with the seed.
FOUND_TWICE: dict[tuple[str, str, int], str] = {
    ("migrate/move_volumes/service-does-it-late", "migrate/disconnect/undo-kill-mid", 1): (
        "nobody looked for what a call makes late when its repetition failed at once"
    ),
    ("unshelve/forget/service-away", "unshelve/forget/delete-while-called", 2): (
        "a delete did not know of the image that an unshelve had still to delete"
    ),
}


def waived(cell: str) -> str:
    """Why the cell with this id is waived; empty: it is not."""
    return next((why for part, why in WAIVED.items() if part in cell), "")
