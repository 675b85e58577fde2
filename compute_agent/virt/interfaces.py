# SPDX-License-Identifier: Apache-2.0
"""What a host makes of a server's interfaces, whatever its hypervisor is.

Called by both drivers: ``plug`` says what a port becomes here, ``when_bridged`` waits for a bridge. Bridges are made by
the network's part on this host, as soon as it has heard of the port: seconds after the port was bound, mostly before
the guest starts.
Must stay true: a port that cannot be plugged is refused before anything of the guest is made or given up.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from common.models import Interface
from compute_agent.virt.driver import Cancelled, Run, VerbFailed

Answer = TypeVar("Answer")

BRIDGE, OVS, BINDING_FAILED = "bridge", "ovs", "binding_failed"
#: Letters of an id that are part of a device's name: Linux takes 15 in all.
ID_LETTERS = 11
OVS_BRIDGE = "br-int"
#: Seconds that a guest waits for a bridge, and between two tries.
BRIDGE_SECONDS, TRY_EVERY = 30.0, 0.5


class NoBridge(VerbFailed):
    """A bridge that is not there, not yet perhaps."""


@dataclass(frozen=True, slots=True)
class Plug:
    """An interface as the host sees it. ``mtu`` 0: not known. ``ovs``: the bridge is Open vSwitch's."""

    port: str
    mac: str
    bridge: str
    device: str
    mtu: int = 0
    ovs: bool = False


def plug(interface: Interface) -> Plug:
    """VerbFailed when the network service bound the port to nothing that this host can plug a guest into."""
    port, kind = interface.port, interface.vif_type
    if kind == BINDING_FAILED:
        raise VerbFailed(f"The network service could not wire port {port} on this host (binding_failed).",
                         details="see whether the network's agent runs on this host", retryable=True)
    if kind not in (BRIDGE, OVS):
        raise VerbFailed(f"Port {port} is bound as {kind or 'nothing'}, which this host cannot plug a guest into; it "
                         f"needs {BRIDGE} or {OVS}.")
    bridge = interface.bridge or (OVS_BRIDGE if kind == OVS else f"brq{interface.network[:ID_LETTERS]}")
    return Plug(port, interface.mac.lower(), bridge, interface.device or f"tap{port[:ID_LETTERS]}", interface.mtu,
                kind == OVS)


def plugs(interfaces: Iterable[Interface]) -> tuple[Plug, ...]:
    """All of a server's, in their order."""
    return tuple(plug(interface) for interface in interfaces)


def when_bridged(run: Run, work: Callable[[], Answer], seconds: float = BRIDGE_SECONDS) -> Answer:
    """Do ``work``, again while it raises NoBridge; after ``seconds`` that is what it fails with."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return work()
        except NoBridge:
            if time.monotonic() > deadline:
                raise
        run.phase("waiting for the network")
        if run.cancelled():
            raise Cancelled
        time.sleep(TRY_EVERY)


def no_bridge(details: str) -> NoBridge:
    """Said alike by every hypervisor."""
    return NoBridge("The server's network is not there on this host; see whether the network's agent runs on it.",
                    details=details, retryable=True)
