# SPDX-License-Identifier: Apache-2.0
"""A server's interfaces on a host, for both drivers.

``plug`` says how a port is connected on this host, ``when_bridged`` waits for a bridge. The network
agent of this host makes bridges seconds after a port was bound, mostly before the guest starts.
Must stay true: a port that cannot be plugged is refused before anything of the guest is made or
given up.
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
#: Characters of an id in a device name: Linux takes 15 in all.
DEVICE_ID_CHARS = 11
OVS_BRIDGE = "br-int"
#: How long a guest waits for a bridge, and between two tries.
BRIDGE_TIMEOUT_SECONDS, RETRY_SECONDS = 30.0, 0.5


class NoBridge(VerbFailed):
    """A bridge is missing, perhaps not made yet."""


@dataclass(frozen=True, slots=True)
class Plug:
    """How an interface is connected on this host. ``mtu`` 0: not known. ``ovs``: the bridge is Open
    vSwitch's."""

    port: str
    mac: str
    bridge: str
    device: str
    mtu: int = 0
    ovs: bool = False


def plug(interface: Interface) -> Plug:
    """VerbFailed when the port's binding is none that this host can plug a guest into."""
    port, kind = interface.port, interface.vif_type
    if kind == BINDING_FAILED:
        raise VerbFailed(
            f"The network service could not wire port {port} on this host (binding_failed).",
            details="see whether the network's agent runs on this host",
            retryable=True,
        )
    if kind not in (BRIDGE, OVS):
        raise VerbFailed(
            f"Port {port} is bound as {kind or 'nothing'}, which this host cannot plug a guest into; it "
            f"needs {BRIDGE} or {OVS}."
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
    """All of a server's, in their order."""
    return tuple(plug(interface) for interface in interfaces)


def when_bridged(
    context: VerbContext, work: Callable[[], Answer], seconds: float = BRIDGE_TIMEOUT_SECONDS
) -> Answer:
    """Do ``work``, and repeat it while it raises NoBridge, for ``seconds`` at most."""
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
    """The failure of a guest whose bridge is missing."""
    return NoBridge(
        "The server's network is not there on this host; see whether the network's agent runs on it.",
        details=details,
        retryable=True,
    )
