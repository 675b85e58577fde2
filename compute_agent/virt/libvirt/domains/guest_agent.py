# SPDX-License-Identifier: Apache-2.0
"""Sets passwords and freezes file systems through the agent inside a guest (qemu-guest-agent).

Called by ``virt.libvirt.driver``, ``snapshots`` and ``still_guests``. The agent is a program of the
tenant, reached through libvirt. The agent may be absent, hang, or send false answers. Therefore
each call has a time limit and no answer is shown to users.

Invariant: file systems that were frozen here are thawed, or the log reports the failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

from common.service.log import get_logger
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.driver import RUNNING
from compute_agent.virt.libvirt.domains import power
from compute_agent.virt.libvirt.domains.connection import (
    AGENT_UNRESPONSIVE_ERRORS,
    NO_SUPPORT_ERRORS,
    Connection,
)
from compute_agent.virt.libvirt.xml.domain_xml import AGENT_CHANNEL

LOG = get_logger(__name__)
ANSWER_TIMEOUT_SECONDS = 5
ABSENT = "The agent in the guest does not answer; install and start qemu-guest-agent in the guest."


def set_password(libvirt: Connection, server: str, user: str, password: str) -> None:
    """Set a user's password in the guest.

    The agent's error text may contain the password and is dropped.

    Raises:
        VerbFailed: The guest does not run, no agent answers, or the agent refuses.
    """
    if power.find_active(libvirt, server).power_state != RUNNING or not is_there(libvirt, server):
        raise VerbFailed(ABSENT)
    _limit_response_time(libvirt, server)
    try:
        is_set = libvirt.on(
            server,
            "set the password in the guest",
            lambda domain: domain.setUserPassword(user, password, 0) == 0,
            AGENT_UNRESPONSIVE_ERRORS,
        )
    except VerbFailed:
        raise VerbFailed(
            "The guest's agent did not set the password; check that the user exists in the guest.",
            details="the agent's error text is not logged, because it may contain the password",
        ) from None
    if not is_set:
        raise VerbFailed(ABSENT)


@contextmanager
def frozen(libvirt: Connection, server: str) -> Iterator[bool]:
    """Freeze the guest's file systems for the duration of the context.

    Yields:
        True if the file systems are frozen. False if the guest does not run or its agent cannot
        freeze them.

    Raises:
        VerbFailed: The server has no domain.
    """
    is_frozen = freeze(libvirt, server)
    try:
        yield is_frozen
    finally:
        if is_frozen:
            thaw(libvirt, server)


def freeze(libvirt: Connection, server: str) -> bool:
    """Flush and freeze the guest's file systems until ``thaw``.

    File systems that an earlier process left frozen are thawed first.

    Returns:
        True if they are frozen, or if the domain has disappeared after the first checks. False if
        the guest does not run, no agent answers, or the freeze failed. A failed freeze is undone,
        unless the log reports that the thaw failed too.

    Raises:
        VerbFailed: The server has no domain.
    """
    if power.find(libvirt, server).power_state != RUNNING or not is_there(libvirt, server):
        return False
    _limit_response_time(libvirt, server)
    # An earlier process may have died and left the guest frozen. If the agent does not answer even
    # this call, do not try further.
    if not thaw(libvirt, server):
        return False
    if _call_agent(
        libvirt, server, "freeze the guest's file systems", lambda domain: domain.fsFreeze()
    ):
        return True
    # The freeze may have happened although the call failed.
    thaw(libvirt, server)
    return False


def thaw(libvirt: Connection, server: str) -> bool:
    """Thaw the guest's file systems. Return False, and log the reason, if the agent fails.

    Without a domain the result is True.
    """
    return _call_agent(
        libvirt, server, "thaw the guest's file systems", lambda domain: domain.fsThaw()
    )


def is_there(libvirt: Connection, server: str) -> bool:
    """Return True if a program in the guest has opened the agent's channel.

    Callers check first that the guest runs. Without a domain or a channel the result is False.
    """
    xml = libvirt.describe(server)
    if not xml:
        return False
    target = ElementTree.fromstring(xml).find(f"devices/channel/target[@name='{AGENT_CHANNEL}']")
    # libvirt's test driver simulates the agent and reports no state.
    return target is not None and target.get("state", "connected") == "connected"


def _limit_response_time(libvirt: Connection, server: str) -> None:
    libvirt.on(
        server,
        "limit the response time of the guest's agent",
        lambda domain: domain.agentSetResponseTimeout(ANSWER_TIMEOUT_SECONDS),
        NO_SUPPORT_ERRORS,
    )


def _call_agent(libvirt: Connection, server: str, purpose: str, work: Callable[[Any], Any]) -> bool:
    try:
        libvirt.on(server, purpose, work)
    except VerbFailed as error:
        LOG.warning(
            "the guest agent of a server failed",
            server=server,
            purpose=purpose,
            details=error.details[:300],
        )
        return False
    return True
