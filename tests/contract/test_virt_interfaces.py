# SPDX-License-Identifier: Apache-2.0
"""Network interfaces of guests, at start, while running and while off.

The tests run on a host in memory, libvirt's mock-up and real QEMU guests. A real guest lists its
interfaces in order. The bridges have no uplink.
"""

from __future__ import annotations

import subprocess
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from common.domain.command_progress import CommandProgress
from common.domain.models import DomainState
from compute_agent.verb_context import Cancelled, VerbContext, VerbFailed
from compute_agent.virt.driver import PAUSED, RUNNING, SHUTDOWN
from compute_agent.virt.interfaces import plug
from compute_agent.virt.libvirt.xml import interface_xml
from deploy.one_machine.machine import libvirtd
from tests.contract.bridge_helper import start_helper
from tests.contract.virt_rigs import NICS, QUIET, Rig, another
from tests.phases import Phases
from tests.waiting import await_true


@pytest.fixture
def hotplug_rig(rig: Rig) -> Rig:
    if rig.kind == "test":
        pytest.skip("libvirt's mock-up plugs nothing in")
    return rig


def test_ensure_guest_plugs_interfaces_in_order_and_absent_removes_them(rig: Rig) -> None:
    nics = [rig.interface() for _ in range(3)]
    spec = rig.spec(user_data=NICS, interfaces=nics)
    for _ in range(2):
        assert rig.driver.ensure_guest(spec, rig.read_image, QUIET).power_state == RUNNING
    rig.await_nics(spec.server, *nics)
    diagnostics = rig.driver.diagnostics(spec.server)
    assert diagnostics["num_nics"] == 3
    assert set(diagnostics["nic_details"][0]) == {
        "mac_address",
        *(
            f"{direction}_{unit}"
            for direction in ("rx", "tx")
            for unit in ("octets", "packets", "errors", "drop", "rate")
        ),
    }
    devices = [Path("/sys/class/net", nic.device) for nic in nics]
    if rig.real:
        for nic, device in zip(nics, devices, strict=True):
            assert (device / "master").resolve().name == nic.bridge
            assert (device / "mtu").read_text().strip() == "1450"
    rig.driver.ensure_absent(spec.server, 2)
    assert not [device for device in devices if device.exists()]


def test_attach_and_detach_interface_on_running_guest_are_repeatable(hotplug_rig: Rig) -> None:
    rig, driver = hotplug_rig, hotplug_rig.driver
    first, second, third = (rig.interface() for _ in range(3))
    spec = rig.boot(ready=True, user_data=NICS, interfaces=[first])
    for _ in range(2):
        assert driver.attach_interface(spec.server, 2, second, QUIET) == DomainState(
            spec.server, RUNNING, 2
        )
    rig.await_nics(spec.server, first, second)
    for _ in range(2):
        assert driver.detach_interface(spec.server, 3, first, QUIET) == DomainState(
            spec.server, RUNNING, 3
        )
    rig.await_nics(spec.server, second)
    assert not Path("/sys/class/net", first.device).exists()
    driver.attach_interface(spec.server, 4, third, QUIET)
    driver.reboot(spec.server, 5, 0, QUIET)
    assert set(rig.nics(spec.server)) == {second.mac, third.mac}


def test_attach_and_detach_interface_on_stopped_guest_apply_at_start(hotplug_rig: Rig) -> None:
    rig, driver = hotplug_rig, hotplug_rig.driver
    first, second = rig.interface(), rig.interface()
    spec = rig.boot(interfaces=[first])
    driver.ensure_stopped(spec.server, 2, 0, QUIET)
    for _ in range(2):
        assert driver.attach_interface(spec.server, 3, second, QUIET) == DomainState(
            spec.server, SHUTDOWN, 3
        )
    driver.ensure_running(spec.server, 4, QUIET)
    assert rig.nics(spec.server) == [first.mac, second.mac]
    driver.ensure_stopped(spec.server, 5, 0, QUIET)
    for _ in range(2):
        assert driver.detach_interface(spec.server, 6, first, QUIET) == DomainState(
            spec.server, SHUTDOWN, 6
        )
    driver.ensure_running(spec.server, 7, QUIET)
    assert rig.nics(spec.server) == [second.mac]


def test_attach_and_detach_interface_on_suspended_guest_are_refused(hotplug_rig: Rig) -> None:
    rig, driver = hotplug_rig, hotplug_rig.driver
    first, second = rig.interface(), rig.interface()
    spec = rig.boot(interfaces=[first])
    driver.ensure_suspended(spec.server, 2, QUIET)
    for change, nic in ((driver.attach_interface, second), (driver.detach_interface, first)):
        with pytest.raises(VerbFailed, match="suspended; resume the server"):
            change(spec.server, 3, nic, QUIET)
    driver.ensure_running(spec.server, 4, QUIET)
    assert rig.nics(spec.server) == [first.mac]


def test_detach_interface_from_paused_guest_fails(hotplug_rig: Rig) -> None:
    rig, driver = hotplug_rig, hotplug_rig.driver
    nic = rig.interface()
    spec = rig.boot(interfaces=[nic])
    driver.ensure_paused(spec.server, 2, QUIET)
    start = time.monotonic()
    with pytest.raises(VerbFailed, match="did not release"):
        driver.detach_interface(spec.server, 3, nic, QUIET)
    assert time.monotonic() - start < 5
    driver.reboot(spec.server, 4, 0, QUIET)
    assert rig.nics(spec.server) == [nic.mac]


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_detach_interface_fails_when_guest_does_not_release_it(
    rig: Rig, private_libvirtd: Path
) -> None:
    from compute_agent.virt.libvirt.domains.connection import Connection
    from compute_agent.virt.libvirt.guests import interfaces

    nic, libvirt = rig.interface(), Connection(libvirtd.uri(private_libvirtd))
    # Without an image the firmware finds no boot device.
    spec = rig.boot(interfaces=[nic], image=None)
    start = time.monotonic()
    with pytest.raises(VerbFailed, match=f"did not release the interface {nic.mac}, which stays"):
        interfaces.detach(libvirt, spec.server, 2, nic.mac, QUIET, seconds=5)
    assert 5 < time.monotonic() - start < 10
    for stored in (False, True):
        assert set(interface_xml.find_interfaces(libvirt.describe(spec.server, stored=stored))) == {
            nic.mac
        }
    with pytest.raises(Cancelled):
        rig.driver.detach_interface(
            spec.server, 3, nic, VerbContext(lambda name: None, lambda: True)
        )
    assert rig.state(spec.server) == (RUNNING, 1)
    libvirt.close()


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_interrupted_attach_or_detach_of_interface_is_completed(
    rig: Rig, private_libvirtd: Path
) -> None:
    from compute_agent.virt.libvirt.domains.connection import AFFECT_CONFIG, AFFECT_LIVE, Connection

    libvirt = Connection(libvirtd.uri(private_libvirtd))
    nics = [rig.interface() for _ in range(3)]
    # Only a guest with an operating system releases an interface.
    spec = rig.boot(image=rig.linux_image, interfaces=nics[:1])
    for nic, part in ((nics[1], AFFECT_LIVE), (nics[2], AFFECT_CONFIG)):
        libvirt.attach(
            spec.server, interface_xml.text(interface_xml.element(plug(nic), None, {})), part
        )
        rig.driver.attach_interface(spec.server, 2, nic, QUIET)
    address_tables = [
        interface_xml.addresses(libvirt.describe(spec.server, stored=stored))
        for stored in (False, True)
    ]
    assert (
        set(address_tables[0]) == {nic.mac for nic in nics}
        and address_tables[0] == address_tables[1]
    )
    rig.await_boots(spec.server, 1)
    stored_xml = interface_xml.text(
        interface_xml.find_interfaces(libvirt.describe(spec.server, stored=True))[nics[1].mac]
    )
    libvirt.on(
        spec.server,
        "cut a detach short",
        lambda domain: domain.detachDeviceFlags(stored_xml, AFFECT_CONFIG),
    )
    rig.driver.detach_interface(spec.server, 3, nics[1], QUIET)
    assert rig.nics(spec.server) == [nics[0].mac, nics[2].mac]
    libvirt.close()


def test_rebuild_rescue_and_unrescue_use_interfaces_of_spec(rig: Rig) -> None:
    first, second, third = (rig.interface() for _ in range(3))
    spec = rig.boot(interfaces=[first, second])
    rig.driver.rebuild(replace(spec, fence=2, image=another(rig)), rig.read_image, True, QUIET)
    assert rig.nics(spec.server) == [first.mac, second.mac]
    changed = replace(spec, interfaces=[second, third])
    rig.driver.rebuild(replace(changed, fence=3), rig.read_image, True, QUIET)
    assert rig.nics(spec.server) == [second.mac, third.mac]
    rig.driver.rescue(replace(changed, fence=4), rig.image, rig.read_image, QUIET)
    assert rig.nics(spec.server) == [second.mac, third.mac]
    rig.driver.unrescue(replace(changed, fence=5), QUIET)
    assert rig.nics(spec.server) == [second.mac, third.mac]


def test_repeated_ensure_guest_replaces_interfaces(hotplug_rig: Rig) -> None:
    rig, driver = hotplug_rig, hotplug_rig.driver
    first, second, third = (rig.interface() for _ in range(3))
    spec = rig.boot(ready=True, image=rig.linux_image, interfaces=[first, second])
    changed = replace(spec, fence=2, interfaces=[second, third])
    assert driver.ensure_guest(changed, rig.read_image, QUIET) == DomainState(
        spec.server, RUNNING, 2
    )
    assert set(rig.nics(spec.server)) == {second.mac, third.mac}
    driver.ensure_stopped(spec.server, 3, 0, QUIET)
    driver.ensure_guest(replace(changed, fence=4, interfaces=[first]), rig.read_image, QUIET)
    assert rig.nics(spec.server) == [first.mac]


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_rescue_and_unrescue_keep_bus_addresses_of_interfaces(
    rig: Rig, private_libvirtd: Path
) -> None:
    from compute_agent.virt.libvirt.domains.connection import Connection

    libvirt = Connection(libvirtd.uri(private_libvirtd))
    first, second, third = (rig.interface() for _ in range(3))
    spec = rig.boot(interfaces=[first])
    rig.driver.attach_interface(spec.server, 2, second, QUIET)
    before = interface_xml.addresses(libvirt.describe(spec.server))
    assert interface_xml.addresses(libvirt.describe(spec.server, stored=True)) == before
    full_spec = replace(spec, interfaces=[third, first, second])
    for fence in (3, 5):
        rig.driver.rescue(replace(full_spec, fence=fence), rig.image, rig.read_image, QUIET)
        rig.driver.unrescue(replace(full_spec, fence=fence + 1), QUIET)
    after = interface_xml.addresses(libvirt.describe(spec.server))
    assert {mac: after[mac] for mac in before} == before and set(after) == {*before, third.mac}
    libvirt.close()


def test_ensure_guest_with_paused_spec_starts_only_at_ensure_running(rig: Rig) -> None:
    spec = rig.spec(user_data=NICS, interfaces=[rig.interface()], paused=True)
    for _ in range(2):
        assert rig.driver.ensure_guest(spec, rig.read_image, QUIET) == DomainState(
            spec.server, PAUSED, 1
        )
    assert rig.state(spec.server) == (PAUSED, 1)
    if rig.real:
        assert rig.boots(spec.server) == 0
        assert Path("/sys/class/net", spec.interfaces[0].device).exists()
    for _ in range(2):
        assert rig.driver.ensure_running(spec.server, 2, QUIET) == DomainState(
            spec.server, RUNNING, 2
        )
    rig.await_nics(spec.server, *spec.interfaces)
    assert rig.driver.ensure_guest(spec, rig.read_image, QUIET).power_state == RUNNING
    rig.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    assert rig.driver.ensure_running(spec.server, 4, QUIET).power_state == RUNNING


def test_ensure_guest_and_attach_interface_wait_for_missing_bridge(hotplug_rig: Rig) -> None:
    rig, phases = hotplug_rig, Phases()

    def report(progress: CommandProgress) -> None:
        phases.append(phase := str(progress))
        if phase == "waiting for the network" and phases.count(phase) == 2:
            rig.make_bridge(missing)

    missing = rig.name_bridge()
    spec = rig.spec(interfaces=[rig.interface(), rig.interface(missing)])
    with pytest.raises(Cancelled):
        rig.driver.ensure_guest(
            spec, rig.read_image, VerbContext(phases, lambda: "waiting for the network" in phases)
        )
    assert (rig.state(spec.server) or (SHUTDOWN,))[0] == SHUTDOWN
    phases.clear()
    assert (
        rig.driver.ensure_guest(
            spec, rig.read_image, VerbContext(report, lambda: False)
        ).power_state
        == RUNNING
    )
    assert phases.count("waiting for the network") == 2
    missing, phases[:] = rig.name_bridge(), []
    late = rig.interface(missing)
    rig.driver.attach_interface(spec.server, 2, late, VerbContext(report, lambda: False))
    assert phases.count("waiting for the network") == 2 and late.mac in rig.nics(spec.server)


def test_ensure_running_waits_for_removed_bridge(hotplug_rig: Rig) -> None:
    rig, phases = hotplug_rig, Phases()
    bridge = rig.name_bridge()
    rig.make_bridge(bridge)
    spec = rig.boot(interfaces=[rig.interface(bridge)])
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    remove_bridge(rig, bridge)

    def report(progress: CommandProgress) -> None:
        phases.append(phase := str(progress))
        if phase == "waiting for the network":
            rig.make_bridge(bridge)

    assert (
        rig.driver.ensure_running(spec.server, 3, VerbContext(report, lambda: False)).power_state
        == RUNNING
    )
    assert "waiting for the network" in phases


@pytest.fixture
def bridging_rig(hotplug_rig: Rig, tmp_path: Path) -> Rig:
    """Return a host that creates bridges of networks, as beside Neutron's Linux bridge agents."""
    if hotplug_rig.real:
        hotplug_rig.restart(bridges=start_helper(tmp_path))
    else:
        hotplug_rig.restart(makes_bridges=True)
    return hotplug_rig


def test_driver_with_bridge_helper_creates_only_bridges_named_by_network(bridging_rig: Rig) -> None:
    rig, phases = bridging_rig, Phases()
    quiet = VerbContext(phases, lambda: "waiting for the network" in phases)
    first, second, third = (rig.name_bridge(f"brq{str(uuid.uuid4())[:11]}") for _ in range(3))
    nics = [rig.interface(first), rig.interface(second)]
    spec = rig.spec(interfaces=nics)
    assert rig.driver.ensure_guest(spec, rig.read_image, quiet).power_state == RUNNING
    late = rig.interface(third)
    rig.driver.attach_interface(spec.server, 2, late, quiet)
    assert set(rig.nics(spec.server)) == {nic.mac for nic in [*nics, late]}
    # As after a reboot of the host, the bridges are missing and the guest is defined.
    rig.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    for name in (first, second, third):
        remove_bridge(rig, name)
    assert rig.driver.ensure_running(spec.server, 4, quiet).power_state == RUNNING
    assert set(rig.nics(spec.server)) == {nic.mac for nic in [*nics, late]}
    # The driver creates only bridges with names made from a network's id.
    other = rig.interface(rig.name_bridge())
    with pytest.raises(Cancelled):
        rig.driver.attach_interface(spec.server, 5, other, quiet)


def remove_bridge(rig: Rig, name: str) -> None:
    if rig.real:
        subprocess.run(["ip", "link", "delete", name], check=True)
        await_true(
            lambda: not Path("/sys/class/net", name).exists(), 5, lambda: f"{name} is still there"
        )
    else:
        rig.driver.host.missing_bridges.add(name)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["", "unbound", "binding_failed", "hostdev"])
def test_verbs_with_port_of_unusable_vif_type_fail_and_change_nothing(rig: Rig, kind: str) -> None:
    bad = replace(rig.interface(), vif_type=kind)
    spec = rig.spec(interfaces=[rig.interface(), bad])
    with pytest.raises(VerbFailed, match=kind or "vif_type none") as failure:
        rig.driver.ensure_guest(spec, rig.read_image, QUIET)
    assert bad.port in str(failure.value) and failure.value.retryable is (kind == "binding_failed")
    assert rig.state(spec.server) is None and rig.files(spec.server) == []
    good = rig.boot()
    new_spec = replace(good, fence=2, interfaces=[bad])
    for attempt in (
        lambda: rig.driver.attach_interface(good.server, 2, bad, QUIET),
        lambda: rig.driver.rebuild(new_spec, rig.read_image, True, QUIET),
        lambda: rig.driver.rescue(new_spec, rig.image, rig.read_image, QUIET),
    ):
        with pytest.raises(VerbFailed, match=bad.port):
            attempt()
        assert rig.state(good.server) == (RUNNING, 1) and rig.nics(good.server) == []


@pytest.mark.parametrize("verb", ["attach_interface", "detach_interface"])
def test_interface_verb_on_server_without_guest_raises_verb_failed(rig: Rig, verb: str) -> None:
    with pytest.raises(VerbFailed, match="no guest on this host"):
        getattr(rig.driver, verb)(rig.spec().server, 1, rig.interface(), QUIET)
