# SPDX-License-Identifier: Apache-2.0
"""The hardware that a server's guest shall have, whatever the hypervisor is.

Called by both drivers before anything of a guest is made or given up.
Must stay true: a guest that holds parts of its host runs on the parts that the claim gave it, or not at all.
"""
from __future__ import annotations

from common import errors
from common.hardware import Hardware, hardware
from common.models import GuestSpec
from compute_agent.virt.driver import VerbFailed


def wanted(spec: GuestSpec) -> Hardware:
    """What flavor and image ask for. VerbFailed when that cannot be, or nobody said which parts of the host it has."""
    try:
        found = hardware(spec.flavor, spec.image.properties if spec.image else {})
    except errors.Problem as refused:
        raise VerbFailed(refused.text) from refused
    if found.needs_fitting and spec.fitting is None:
        raise VerbFailed("The server needs CPUs, memory or devices of its own, and none are claimed for it here; "
                         "rebuild or move it.", details=f"no fitting in the command for {spec.server}")
    return found


def still_demanded() -> VerbFailed:
    """Said alike by every hypervisor."""
    return VerbFailed("The guest's file systems could not be made still, and its image demands that "
                      "(os_require_quiesce); see whether qemu-guest-agent runs in it.")
