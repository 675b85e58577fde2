# SPDX-License-Identifier: Apache-2.0
"""Interfaces of guests: supported kinds of ports, the wait for a bridge, and the domain's XML."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from common.domain.models import Interface
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.interfaces import NoBridge, Plug, no_bridge, plug, when_bridged
from compute_agent.virt.libvirt.xml import interface_xml
from compute_agent.virt.memory.state.script import QUIET
from tests.phases import Phases

PORT = "0f6b4a52-7c1d-4f0e-9a3b-1c2d3e4f5a6b"
NETWORK = "9b8a7c6d-5e4f-4a3b-8c2d-1e0f9a8b7c6d"
WIRED = Interface(
    PORT,
    NETWORK,
    "private",
    "FA:16:3E:00:00:01",
    vif_type="bridge",
    bridge="brq-told",
    device="tap-told",
    mtu=1450,
)


def test_plug_uses_names_of_port_and_derives_missing_names_from_ids() -> None:
    assert plug(WIRED) == Plug(PORT, "fa:16:3e:00:00:01", "brq-told", "tap-told", 1450)
    unnamed = replace(WIRED, bridge="", device="", mtu=0)
    assert plug(unnamed) == Plug(PORT, "fa:16:3e:00:00:01", "brq9b8a7c6d-5e", "tap0f6b4a52-7c")
    switched = Plug(PORT, "fa:16:3e:00:00:01", "br-int", "tap0f6b4a52-7c", ovs=True)
    assert plug(replace(unnamed, vif_type="ovs")) == switched
    assert len(plug(unnamed).bridge) < 16 and len(plug(unnamed).device) < 16


@pytest.mark.parametrize(
    ("kind", "message", "retryable"),
    [
        ("", "vif_type none", False),
        ("unbound", "unbound", False),
        ("vhostuser", "vhostuser", False),
        ("ovs_hybrid", "ovs_hybrid", False),
        ("binding_failed", "binding_failed", True),
    ],
)
def test_plug_refuses_unsupported_kind_of_port_and_names_it(
    kind: str, message: str, retryable: bool
) -> None:
    with pytest.raises(VerbFailed, match=message) as failed:
        plug(replace(WIRED, vif_type=kind))
    assert PORT in str(failed.value) and failed.value.retryable is retryable


def test_when_bridged_retries_until_bridge_exists_and_reports_wait() -> None:
    phases = Phases()

    def work() -> str:
        if len(phases) < 2:
            raise no_bridge("brq1")
        return "plugged"

    assert when_bridged(VerbContext(phases, lambda: False), work) == "plugged"
    assert phases == ["waiting for the network"] * 2


def test_when_bridged_ends_after_timeout_or_cancel() -> None:
    def missing() -> None:
        raise no_bridge("no brq1")

    began = time.monotonic()
    with pytest.raises(NoBridge, match="This host lacks the bridge of a network") as failed:
        when_bridged(QUIET, missing, seconds=0.1)
    assert failed.value.retryable and failed.value.details == "no brq1"
    with pytest.raises(Cancelled):
        when_bridged(VerbContext(lambda name: None, lambda: True), missing)
    assert time.monotonic() - began < 5


def test_when_bridged_does_not_retry_other_failures() -> None:
    def broken() -> None:
        raise VerbFailed("No such device", retryable=True)

    with pytest.raises(VerbFailed, match="No such device"):
        when_bridged(VerbContext(lambda name: pytest.fail("waits"), lambda: False), broken)


def test_interface_xml_is_read_back_from_domain_description() -> None:
    place = {"type": "pci", "domain": "0x0000", "bus": "0x00", "slot": "0x07", "function": "0x0"}
    placed, fresh = plug(WIRED), plug(replace(WIRED, mac="fa:16:3e:00:00:02", bridge="brq-other"))
    elements = [interface_xml.element(placed, place, {}), interface_xml.element(fresh, None, {})]
    description = (
        f"<domain><devices>{''.join(map(interface_xml.text, elements))}</devices></domain>"
    )
    assert set(interface_xml.find_interfaces(description)) == {placed.mac, fresh.mac}
    assert interface_xml.addresses(description) == {placed.mac: place}
    assert interface_xml.bridges(description) == {"brq-told", "brq-other"}
    assert interface_xml.bridges(interface_xml.text(elements[0])) == {"brq-told"}
    assert interface_xml.find_interfaces("") == interface_xml.addresses("") == {}
