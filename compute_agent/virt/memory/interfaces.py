# SPDX-License-Identifier: Apache-2.0
"""Network interfaces of guests in memory."""

from __future__ import annotations

from common.domain.command_progress import CommandPhase
from common.domain.models import DomainState, Interface
from compute_agent.verb_context import VerbContext, VerbFailed
from compute_agent.virt.driver import PAUSED, RUNNING
from compute_agent.virt.memory import power
from compute_agent.virt.memory.state.guest import MemoryGuest
from compute_agent.virt.memory.state.host import MemoryHost, state_of


def attach(
    host: MemoryHost, server: str, fence: int, interface: Interface, context: VerbContext
) -> DomainState:
    """Attach an interface when its bridge exists, and record the fence.

    If the guest has an interface with this MAC address, that interface is kept.

    Raises:
        VerbFailed: The guest does not exist or is suspended, the interface is not supported, or the
            bridge does not appear in time.
    """
    _refuse_suspended(host, server)
    context.phase(CommandPhase.ATTACHING_INTERFACE)
    power.await_bridges(host, [interface], context)
    with host.lock:
        guest = host.guest(server)
        if _mac(interface) not in map(_mac, guest.interfaces):
            guest.interfaces.append(interface)
        return _store_change(host, server, guest, fence)


def detach(
    host: MemoryHost, server: str, fence: int, interface: Interface, context: VerbContext
) -> DomainState:
    """Detach the interface with this MAC address. If the guest lacks it, only record the fence.

    Raises:
        VerbFailed: The guest does not exist, is suspended, or does not release the interface. A
            paused guest releases no interface.
    """
    _refuse_suspended(host, server)
    context.phase(CommandPhase.DETACHING_INTERFACE)
    with host.lock:
        guest = host.guest(server)
        remaining = [other for other in guest.interfaces if _mac(other) != _mac(interface)]
        holds = guest.power_state == PAUSED or (
            guest.power_state == RUNNING and guest.holds_interfaces
        )
        if holds and remaining != guest.interfaces:
            raise VerbFailed(
                f"The guest did not release the interface {_mac(interface)}, which stays attached."
            )
        guest.interfaces = remaining
        return _store_change(host, server, guest, fence)


def _refuse_suspended(host: MemoryHost, server: str) -> None:
    if host.guest(server).saved:
        raise VerbFailed(
            "The server is suspended; resume the server before you change its interfaces."
        )


def _store_change(host: MemoryHost, server: str, guest: MemoryGuest, fence: int) -> DomainState:
    guest.fence = fence
    host.write(server, guest)
    return state_of(server, guest)


def _mac(interface: Interface) -> str:
    return interface.mac.lower()
