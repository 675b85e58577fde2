# SPDX-License-Identifier: Apache-2.0
"""Plugs and unplugs the network interfaces of an existing domain.

Called by ``virt.libvirt.driver`` and ``guests``. Each function first checks the running domain and
the stored definition, and changes only the definition that differs.

Invariant: an interface leaves the stored definition only after the running guest has released it,
so that the stored definition always lists all interfaces of the guest.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.domain.command_progress import CommandPhase
from common.domain.models import DomainState
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.driver import PAUSED
from compute_agent.virt.interfaces import Plug, when_bridged
from compute_agent.virt.libvirt.domains import power
from compute_agent.virt.libvirt.domains.connection import (
    AFFECT_CONFIG,
    AFFECT_LIVE,
    Connection,
    GuestDomain,
)
from compute_agent.virt.libvirt.domains.unplugging import RELEASE_SECONDS, unplug
from compute_agent.virt.libvirt.xml import interface_xml


def attach(
    libvirt: Connection, server: str, fence: int, plug: Plug, context: VerbContext
) -> DomainState:
    """Attach the interface to the stored definition, and to the domain if active.

    An interface that is present is not attached again. The fence is recorded, and the domain's
    state returned.

    Raises:
        VerbFailed: The server is suspended or has no domain, libvirt refuses, or the interface's
            bridge does not appear in time.
        Cancelled: The verb was cancelled before anything was changed.
    """

    def work() -> None:
        domain, xml = _find_changeable(libvirt, server), libvirt.describe(server)
        is_missing_live = domain.active and plug.mac not in interface_xml.find_interfaces(xml)
        is_missing_stored = plug.mac not in interface_xml.find_interfaces(
            libvirt.describe(server, stored=True)
        )
        if context.cancelled():
            raise Cancelled
        if is_missing_live or is_missing_stored:
            # An interrupted attach may have left the interface in the running guest only. Store the
            # device address from there.
            place = interface_xml.addresses(xml).get(plug.mac)
            description = interface_xml.text(
                interface_xml.element(plug, place, domain.marks.options)
            )
            libvirt.attach(
                server,
                description,
                AFFECT_LIVE * is_missing_live | AFFECT_CONFIG * is_missing_stored,
            )

    context.phase(CommandPhase.ATTACHING_INTERFACE)
    when_bridged(context, work)
    libvirt.mark(server, fence=fence)
    return power.state(power.find(libvirt, server))


def detach(
    libvirt: Connection,
    server: str,
    fence: int,
    mac: str,
    context: VerbContext,
    seconds: float = RELEASE_SECONDS,
) -> DomainState:
    """Detach the interface from the domain if active, and from the stored definition.

    A missing interface is ignored. The fence is recorded, and the domain's state returned.

    Raises:
        VerbFailed: The server is suspended or has no domain, or the guest is paused or does not
            release the interface within ``seconds``. The interface stays in both definitions.
        Cancelled: The verb was cancelled while the guest held the interface.
    """
    context.phase(CommandPhase.DETACHING_INTERFACE)
    unplug(
        libvirt,
        server,
        "interface",
        lambda: _find_changeable(libvirt, server),
        lambda xml: interface_xml.alias_of(xml, mac),
        lambda domain, refusal: _not_released(domain, mac, refusal),
        context,
        seconds,
    )
    if (
        interface := interface_xml.find_interfaces(libvirt.describe(server, stored=True)).get(mac)
    ) is not None:
        description = interface_xml.text(interface)
        libvirt.on(
            server,
            "remove the interface from the definition",
            lambda domain: domain.detachDeviceFlags(description, AFFECT_CONFIG),
        )
    libvirt.mark(server, fence=fence)
    return power.state(power.find(libvirt, server))


def settle(
    libvirt: Connection, server: str, fence: int, plugs: Iterable[Plug], context: VerbContext
) -> None:
    """Attach and detach interfaces until domain and definition have exactly the MACs of ``plugs``.

    An interface with the MAC address of a plug is not changed, even if the rest differs.

    Raises:
        VerbFailed: An interface cannot be attached or detached.
        Cancelled: The verb was cancelled. Some interfaces may have been changed.
    """
    plugs_by_mac = {plug.mac: plug for plug in plugs}
    present_macs = {
        mac
        for stored in (False, True)
        for mac in interface_xml.find_interfaces(libvirt.describe(server, stored=stored))
    }
    for mac in present_macs - set(plugs_by_mac):
        detach(libvirt, server, fence, mac, context)
    for plug in plugs_by_mac.values():
        attach(libvirt, server, fence, plug, context)


def _not_released(domain: GuestDomain, mac: str, refusal: str) -> VerbFailed:
    advice = (
        "The guest is paused; resume the server and try again"
        if domain.power_state == PAUSED
        else "Try again when the guest has booted"
    )
    return VerbFailed(
        f"The guest did not release the interface {mac}, which stays attached. {advice}.",
        details=refusal,
    )


def _find_changeable(libvirt: Connection, server: str) -> GuestDomain:
    """Return the domain, or raise VerbFailed if suspended or missing.

    Why: saved memory can be restored only with the interfaces that were saved.
    """
    domain = power.find(libvirt, server)
    if domain.saved:
        raise VerbFailed(
            "The server is suspended; resume the server before you change its interfaces."
        )
    return domain
