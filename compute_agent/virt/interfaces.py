# SPDX-License-Identifier: Apache-2.0
"""A server's interfaces on a host, for both drivers.

``plug`` returns how a port is connected on this host. The network agent of the host makes the
bridge of a port seconds after the port was bound. ``when_bridged`` waits for this bridge.

Invariant: a port that cannot be plugged is refused before anything of the guest is made or deleted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from common.domain.command_progress import CommandPhase
from common.domain.models import Interface
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed

Answer = TypeVar("Answer")

BRIDGE, OVS, BINDING_FAILED = "bridge", "ovs", "binding_failed"
#: Characters of an id in a device name, which Linux limits to 15 characters.
DEVICE_ID_CHARS = 11
OVS_BRIDGE = "br-int"
#: Seconds for which a guest waits for a bridge, and seconds between two attempts.
BRIDGE_TIMEOUT_SECONDS, RETRY_SECONDS = 30.0, 0.5


class NoBridge(VerbFailed):
    """The bridge of an interface is missing. The host's network agent may still make the bridge."""


@dataclass(frozen=True, slots=True)
class Plug:
    """The connection of an interface on this host.

    Attributes:
        port: Id of the port.
        mac: MAC address in lower case.
        bridge: Name of the bridge.
        device: Name of the interface's device on the host.
        mtu: MTU in bytes, or 0 if unknown.
        ovs: True for a bridge of Open vSwitch.
    """

    port: str
    mac: str
    bridge: str
    device: str
    mtu: int = 0
    ovs: bool = False


def plug(interface: Interface) -> Plug:
    """Return the ``Plug`` of an interface: its bridge and device. The host itself is not examined.

    If the network service left out the bridge, the name is ``OVS_BRIDGE`` for Open vSwitch, else
    "brq" and the beginning of the network's id. A device that was left out is named "tap" and the
    beginning of the port's id.

    Raises:
        VerbFailed: The binding failed, or has a type that this host does not support.
    """
    port, kind = interface.port, interface.vif_type
    if kind == BINDING_FAILED:
        raise VerbFailed(
            f"The network service could not bind port {port} on this host (binding_failed).",
            details="check that the network agent runs on this host",
            retryable=True,
        )
    if kind not in (BRIDGE, OVS):
        raise VerbFailed(
            f"Port {port} has the vif_type {kind or 'none'}, which this host does not support; bind it as "
            f"{BRIDGE} or {OVS}."
        )
    bridge = interface.bridge or (
        OVS_BRIDGE if kind == OVS else f"brq{interface.network[:DEVICE_ID_CHARS]}"
    )
    return Plug(
        port,
        interface.mac.lower(),
        bridge,
        interface.device or f"tap{port[:DEVICE_ID_CHARS]}",
        interface.mtu,
        kind == OVS,
    )


def plugs(interfaces: Iterable[Interface]) -> tuple[Plug, ...]:
    """Return the ``Plug`` of each interface, in the same order.

    Raises:
        VerbFailed: The binding of an interface failed, or has a type that this host does not
            support.
    """
    return tuple(plug(interface) for interface in interfaces)


def when_bridged(
    context: VerbContext, work: Callable[[], Answer], seconds: float = BRIDGE_TIMEOUT_SECONDS
) -> Answer:
    """Call ``work`` until it does not raise NoBridge, for at most ``seconds``. Return the result.

    Between two calls the verb reports the phase WAITING_FOR_NETWORK. Other exceptions of ``work``
    are raised at once.

    Raises:
        Cancelled: The command was cancelled between two calls.
        NoBridge: The bridge is still missing after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return work()
        except NoBridge:
            if time.monotonic() > deadline:
                raise
        context.phase(CommandPhase.WAITING_FOR_NETWORK)
        if context.cancelled():
            raise Cancelled
        time.sleep(RETRY_SECONDS)


def no_bridge(details: str) -> NoBridge:
    """Return the failure of a verb whose guest needs a bridge that this host lacks.

    ``details`` is for the operator.
    """
    return NoBridge(
        "This host lacks the bridge of a network of the server; check that the network agent runs on the host.",
        details=details,
        retryable=True,
    )
