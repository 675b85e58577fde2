# SPDX-License-Identifier: Apache-2.0
"""The agent inside a guest (qemu-guest-agent), reached through libvirt: passwords, and still file
systems.

Called by ``virt.libvirt.driver`` and ``snapshots``. The agent is a program of the tenant's: it may
be absent, hang or lie, so each question has a time limit and what it says is not passed on. Must
stay true: file systems that were frozen here are thawed, or it is said in the log that they may not
be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import RUNNING
from compute_agent.virt.libvirt.domains import power
from compute_agent.virt.libvirt.domains.connection import (
    AGENT_UNRESPONSIVE_ERRORS,
    NO_SUPPORT_ERRORS,
    Connection,
)
from compute_agent.virt.libvirt.xml.domain_xml import AGENT_CHANNEL

LOG = logging.getLogger(__name__)
ANSWER_TIMEOUT_SECONDS = 5
ABSENT = "The guest has no agent that answers; install and start qemu-guest-agent in it."


def set_password(libvirt: Connection, server: str, user: str, password: str) -> None:
    """VerbFailed when there is no agent or it refuses; its words could hold the password, so they
    are dropped."""
    if power.find_active(libvirt, server).power_state != RUNNING or not is_there(libvirt, server):
        raise VerbFailed(ABSENT)
    _limit(libvirt, server)
    try:
        answered = libvirt.on(
            server,
            "set the password in the guest",
            lambda domain: domain.setUserPassword(user, password, 0) == 0,
            AGENT_UNRESPONSIVE_ERRORS,
        )
    except VerbFailed:
        raise VerbFailed(
            "The guest's agent did not set the password; see whether the user exists in the guest.",
            details="what the agent said is not kept: it might be the password",
        ) from None
    if not answered:
        raise VerbFailed(ABSENT)


@contextmanager
def frozen(libvirt: Connection, server: str) -> Iterator[bool]:
    """The guest's file systems are written out and still meanwhile; False when its agent cannot do
    that."""
    still = freeze(libvirt, server)
    try:
        yield still
    finally:
        if still:
            thaw(libvirt, server)


def freeze(libvirt: Connection, server: str) -> bool:
    """Write the guest's file systems out and hold them still until ``thaw``; False when its agent
    cannot do that."""
    if power.find(libvirt, server).power_state != RUNNING or not is_there(libvirt, server):
        return False
    _limit(libvirt, server)
    # A guest that was frozen by a process of ours that died stays frozen until it is told; one that
    # does not even answer this is not asked for more.
    if not thaw(libvirt, server):
        return False
    if _try(libvirt, server, "freeze the guest's file systems", lambda domain: domain.fsFreeze()):
        return True
    thaw(libvirt, server)  # it may be frozen all the same
    return False


def thaw(libvirt: Connection, server: str) -> bool:
    return _try(libvirt, server, "thaw the guest's file systems", lambda domain: domain.fsThaw())


def is_there(libvirt: Connection, server: str) -> bool:
    """Whether a program in the guest listens on the agent's channel."""
    described = libvirt.describe(server)
    if not described:
        return False
    target = ElementTree.fromstring(described).find(
        f"devices/channel/target[@name='{AGENT_CHANNEL}']"
    )
    # libvirt's mock-up, which answers for its agent itself, does not tell of a state.
    return target is not None and target.get("state", "connected") == "connected"


def _limit(libvirt: Connection, server: str) -> None:
    libvirt.on(
        server,
        "limit the agent's time",
        lambda domain: domain.agentSetResponseTimeout(ANSWER_TIMEOUT_SECONDS),
        NO_SUPPORT_ERRORS,
    )


def _try(libvirt: Connection, server: str, what: str, work: Callable[[Any], Any]) -> bool:
    try:
        libvirt.on(server, what, work)
    except VerbFailed as failed:
        LOG.warning("the agent in server %s did not %s: %s", server, what, failed.details[:300])
        return False
    return True
