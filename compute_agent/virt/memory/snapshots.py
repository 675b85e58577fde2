# SPDX-License-Identifier: Apache-2.0
"""Snapshots of guests in memory: the root disk as an image."""

from __future__ import annotations

from collections.abc import Iterator

from common.domain import errors
from common.domain.command_progress import CommandPhase
from compute_agent.verb_context import ImageWriter, VerbContext, VerbFailed
from compute_agent.virt.driver import quiesce_failed
from compute_agent.virt.memory.state.host import MemoryHost
from compute_agent.virt.memory.state.script import wait


def snapshot(host: MemoryHost, server: str, write_image: ImageWriter, context: VerbContext) -> int:
    """Write the root disk as an image to ``write_image``, and return the size in bytes.

    Raises:
        VerbFailed: The guest does not exist, its image requires frozen file systems and the active
            guest cannot freeze them, or the image service refuses the image.
        errors.Unavailable: The image service does not answer.
    """
    with host.lock:
        guest = host.guest(server)
        if guest.is_active and not guest.can_be_still:
            raise quiesce_failed()
        content = guest.disk_image()
    context.phase(CommandPhase.COPYING_DISK, 100)
    wait(0, context)

    def chunks() -> Iterator[bytes]:
        wait(0, context)
        yield content
        context.phase(CommandPhase.UPLOADING, 100)

    try:
        write_image(chunks())
    except errors.Unavailable:
        raise
    except errors.Problem as refused:
        raise VerbFailed(refused.text, details=repr(refused)) from refused
    wait(0, context)
    return len(content)
