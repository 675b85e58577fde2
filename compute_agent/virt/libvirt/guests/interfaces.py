# SPDX-License-Identifier: Apache-2.0
"""Network interfaces of a domain that exists: plugged in and pulled out.

Called by ``virt.libvirt.driver`` and ``guests``. Each function looks first, at the running domain
and at its stored definition, and does what is missing in either. Must stay true: an interface
leaves the stored definition only when the running guest has let go of it, so that what libvirt
tells is what the guest has.
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
    """The domain has the interface: at once when it is active, else from its next start on."""

    def work() -> None:
        found, described = _changeable(libvirt, server), libvirt.describe(server)
        live = found.active and plug.mac not in interface_xml.found(described)
        stored = plug.mac not in interface_xml.found(libvirt.describe(server, stored=True))
        if context.cancelled():
            raise Cancelled
        if live or stored:
            # One that an attach which was cut off has left in the guest alone is stored with the
            # place that it has.
            place = interface_xml.addresses(described).get(plug.mac)
            description = interface_xml.text(
                interface_xml.element(plug, place, found.marks.options)
            )
            libvirt.attach(server, description, AFFECT_LIVE * live | AFFECT_CONFIG * stored)

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
    """The domain has the interface no more. VerbFailed when the guest does not let go of it in
    time: then it stays."""
    context.phase(CommandPhase.DETACHING_INTERFACE)
    unplug(
        libvirt,
        server,
        "interface",
        lambda: _changeable(libvirt, server),
        lambda described: interface_xml.alias_of(described, mac),
        lambda found, refusal: _held(found, mac, refusal),
        context,
        seconds,
    )
    if (
        interface := interface_xml.found(libvirt.describe(server, stored=True)).get(mac)
    ) is not None:
        description = interface_xml.text(interface)
        libvirt.on(
            server,
            "pull out the interface",
            lambda domain: domain.detachDeviceFlags(description, AFFECT_CONFIG),
        )
    libvirt.mark(server, fence=fence)
    return power.state(power.find(libvirt, server))


def settle(
    libvirt: Connection, server: str, fence: int, plugs: Iterable[Plug], context: VerbContext
) -> None:
    """The active domain has these interfaces and no others."""
    wanted = {plug.mac: plug for plug in plugs}
    has = {
        mac
        for stored in (False, True)
        for mac in interface_xml.found(libvirt.describe(server, stored=stored))
    }
    for mac in has - set(wanted):
        detach(libvirt, server, fence, mac, context)
    for plug in wanted.values():
        attach(libvirt, server, fence, plug, context)


def _held(found: GuestDomain, mac: str, refusal: str) -> VerbFailed:
    why = (
        "it is paused; resume it first"
        if found.power_state == PAUSED
        else "try again when it has booted"
    )
    return VerbFailed(
        f"The guest did not let go of the interface {mac}: {why}. The interface stays.",
        details=refusal,
    )


def _changeable(libvirt: Connection, server: str) -> GuestDomain:
    """The domain, unless it is suspended: saved memory goes on with the interfaces that it was
    saved with."""
    found = power.find(libvirt, server)
    if found.saved:
        raise VerbFailed("The server is suspended; resume it before its interfaces are changed.")
    return found
