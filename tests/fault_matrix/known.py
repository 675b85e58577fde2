# SPDX-License-Identifier: Apache-2.0
"""Cells that are waived, cells that fail, and cells that found defects.

The summary of a run counts failing cells as failed, and names the waivers.
"""

from __future__ import annotations

#: Part of an id -> the reason why these cells cannot exist. At most one cell in a hundred.
WAIVED: dict[str, str] = {}
#: Id -> the reason of the failure, and the remedy. The default set leaves these cells out.
KNOWN: dict[str, str] = {}

#: Id -> the repaired defect that the cell found. The default set runs each of these cells.
FOUND: dict[str, str] = {
    **{
        f"{workflow}/disconnect/undo-refused": (
            "a guest ran without its volumes because its host had not defined them again"
        )
        for workflow in ("migrate", "resize", "revert_resize", "rebuild")
    },
    "attach_volume/attach/undo-refused": (
        "after a failed attach and a failed detach on the host, no cleanup removed the volume"
    ),
    "rebuild/reserve_volumes/undo-refused": (
        "volumes refused during the undo stayed reserved, and the guest ran without them"
    ),
    "rebuild/connect_volumes/undo-refused": (
        "volumes refused during the undo stayed reserved after the volume was written"
    ),
    "rebuild/connect_volumes/service-refuses": (
        "volumes refused during the undo stayed reserved after a refused connection"
    ),
    "resize_here/remake/host-gone": (
        "the undo waited forever for a host that was forced down, because too few hosts reported to judge silence"
    ),
    "evacuate/revive/undo-kill-mid": (
        "the conductor ignored a host that reported again but was still forced down, so its guest stayed off"
    ),
    "evacuate/then/evacuate": (
        "the second evacuation superseded the first, which had placed the server on a running host, and failed. "
        "No record of the guest on the dead host remained"
    ),
    "create/networks/service-does-it-late": (
        "a port that the network service created after the timeout and the retry was left behind"
    ),
    "attach_interface/networks/service-does-it-late": (
        "a port that the network service created after the timeout was left behind"
    ),
    **{
        f"{step}/service-does-it-late": (
            "an attachment that the volume service created after the timeout was left behind"
        )
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
        f"{step}/service-does-it-late": (
            "an attachment created after the timeout was left behind when the server moved"
        )
        for step in (
            "evacuate/move_volumes",
            "live_migrate/connect_there",
            "migrate/move_volumes",
            "resize/move_volumes",
            "revert_resize/move_volumes",
        )
    },
    "remove_security_group/change/conductor-kill-mid": (
        "the action failed because the group had been removed before a crash"
    ),
    "revert_here/restart/undo-refused": (
        "after a failed start the server was in ERROR, and its resize could be neither confirmed nor reverted"
    ),
    "live_migrate/migrate/agent-kill-mid": (
        "the driver in memory had a guest twice when killed while handing it over"
    ),
    "live_migrate/migrate/hypervisor-restarts": (
        "the driver in memory had a guest twice when the hypervisor restarted"
    ),
    "detach_volume/detach/host-gone": (
        "a volume detached while its host was down was still in the guest that the host started later"
    ),
    "detach_share/detach/host-gone": (
        "a share detached while its host was down was still in the guest that the host started later"
    ),
}
#: First cell, cell of the second fault, and seed -> the repaired defect that both found.
FOUND_TWICE: dict[tuple[str, str, int], str] = {
    ("migrate/move_volumes/service-does-it-late", "migrate/disconnect/undo-kill-mid", 1): (
        "no cleanup looked for the late result of a call when its retry failed at once"
    ),
    ("unshelve/forget/service-away", "unshelve/forget/delete-while-called", 2): (
        "a delete did not remove the image that an unshelve still had to delete"
    ),
}


def find_waiver(cell: str) -> str:
    """Return the reason why the cell with this id is waived, or an empty string."""
    return next((reason for part, reason in WAIVED.items() if part in cell), "")
