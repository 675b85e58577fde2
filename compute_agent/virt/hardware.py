# SPDX-License-Identifier: Apache-2.0
"""The hardware of a server's guest, for both drivers.

Called before anything of a guest is made or given up.
Must stay true: a guest with dedicated parts of its host runs on the parts that its claim holds, or
not at all.
"""

from __future__ import annotations

from common import errors
from common.hardware import Hardware, hardware
from common.models import GuestSpec
from compute_agent.virt.driver import VerbFailed


def required_hardware(spec: GuestSpec) -> Hardware:
    """What flavor and image ask for. VerbFailed when that is impossible, or the command assigns no
    parts of the host."""
    try:
        found = hardware(spec.flavor, spec.image.properties if spec.image else {})
    except errors.Problem as refused:
        raise VerbFailed(refused.text) from refused
    if found.needs_assignment and spec.assignment is None:
        raise VerbFailed(
            "The server needs CPUs, memory or devices of its own, and none are claimed for it here; "
            "rebuild or move it.",
            details=f"no assignment in the command for {spec.server}",
        )
    return found


def quiesce_failed() -> VerbFailed:
    """The failure of a snapshot whose file systems cannot be frozen although the image requires
    it."""
    return VerbFailed(
        "The guest's file systems could not be frozen, and its image requires that "
        "(os_require_quiesce); see whether qemu-guest-agent runs in it."
    )
