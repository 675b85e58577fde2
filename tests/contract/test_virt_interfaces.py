# SPDX-License-Identifier: Apache-2.0
"""Network interfaces, on the same hypervisors: what a guest has when it starts, while it runs and
when it was off.

A real guest says itself which interfaces it has and in which order; its bridges lead nowhere.
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
def plugging(rig: Rig) -> Rig:
    if rig.kind == "test":
        pytest.skip("libvirt's mock-up plugs nothing in")
    return rig


def test_guest_has_its_interfaces_in_their_order_until_it_is_gone(rig: Rig) -> None:
    nics = [rig.interface() for _ in range(3)]
    spec = rig.spec(user_data=NICS, interfaces=nics)
    for _ in range(2):
        assert rig.driver.ensure_guest(spec, rig.read_image, QUIET).power_state == RUNNING
    rig.await_nics(spec.server, *nics)
    counted = rig.driver.diagnostics(spec.server)
    assert counted["num_nics"] == 3
    assert set(counted["nic_details"][0]) == {
        "mac_address",
        *(
            f"{way}_{what}"
            for way in ("rx", "tx")
            for what in ("octets", "packets", "errors", "drop", "rate")
        ),
    }
    devices = [Path("/sys/class/net", nic.device) for nic in nics]
    if rig.real:
        for nic, device in zip(nics, devices, strict=True):
            assert (device / "master").resolve().name == nic.bridge
            assert (device / "mtu").read_text().strip() == "1450"
    rig.driver.ensure_absent(spec.server, 2)
    assert not [device for device in devices if device.exists()]


def test_running_guest_gets_an_interface_and_lets_go_of_it(plugging: Rig) -> None:
    rig, driver = plugging, plugging.driver
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


def test_stopped_guest_has_the_change_from_its_next_start_on(plugging: Rig) -> None:
    rig, driver = plugging, plugging.driver
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


def test_suspended_guest_keeps_what_it_was_saved_with(plugging: Rig) -> None:
    rig, driver = plugging, plugging.driver
    first, second = rig.interface(), rig.interface()
    spec = rig.boot(interfaces=[first])
    driver.ensure_suspended(spec.server, 2, QUIET)
    for change, nic in ((driver.attach_interface, second), (driver.detach_interface, first)):
        with pytest.raises(VerbFailed, match="suspended; resume it"):
            change(spec.server, 3, nic, QUIET)
    driver.ensure_running(spec.server, 4, QUIET)
    assert rig.nics(spec.server) == [first.mac]


def test_paused_guest_does_not_let_go(plugging: Rig) -> None:
    rig, driver = plugging, plugging.driver
    nic = rig.interface()
    spec = rig.boot(interfaces=[nic])
    driver.ensure_paused(spec.server, 2, QUIET)
    began = time.monotonic()
    with pytest.raises(VerbFailed, match="did not let go"):
        driver.detach_interface(spec.server, 3, nic, QUIET)
    assert time.monotonic() - began < 5
    driver.reboot(spec.server, 4, 0, QUIET)
    assert rig.nics(spec.server) == [nic.mac]


@pytest.mark.slice("guests")
@pytest.mark.kvm_or_tcg
@pytest.mark.parametrize("rig", ["qemu"], indirect=True)
def test_interface_that_the_guest_does_not_release_stays(rig: Rig, private_libvirtd: Path) -> None:
    from compute_agent.virt.libvirt.domains.connection import Connection
    from compute_agent.virt.libvirt.guests import interfaces

    nic, libvirt = rig.interface(), Connection(libvirtd.uri(private_libvirtd))
    spec = rig.boot(interfaces=[nic], image=None)  # its firmware finds nothing to boot
    began = time.monotonic()
    with pytest.raises(VerbFailed, match=f"did not let go of the interface {nic.mac}.* stays"):
        interfaces.detach(libvirt, spec.server, 2, nic.mac, QUIET, seconds=5)
    assert 5 < time.monotonic() - began < 10
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
def test_change_that_was_cut_short_is_completed(rig: Rig, private_libvirtd: Path) -> None:
    from compute_agent.virt.libvirt.domains.connection import AFFECT_CONFIG, AFFECT_LIVE, Connection

    libvirt = Connection(libvirtd.uri(private_libvirtd))
    nics = [rig.interface() for _ in range(3)]
    spec = rig.boot(interfaces=nics[:1])
    for nic, part in ((nics[1], AFFECT_LIVE), (nics[2], AFFECT_CONFIG)):
        libvirt.attach(
            spec.server, interface_xml.text(interface_xml.element(plug(nic), None, {})), part
        )
        rig.driver.attach_interface(spec.server, 2, nic, QUIET)
    both = [
        interface_xml.addresses(libvirt.describe(spec.server, stored=stored))
        for stored in (False, True)
    ]
    assert set(both[0]) == {nic.mac for nic in nics} and both[0] == both[1]
    rig.await_boots(spec.server, 1)
    left = interface_xml.text(
        interface_xml.find_interfaces(libvirt.describe(spec.server, stored=True))[nics[1].mac]
    )
    libvirt.on(
        spec.server,
        "cut a detach short",
        lambda domain: domain.detachDeviceFlags(left, AFFECT_CONFIG),
    )
    rig.driver.detach_interface(spec.server, 3, nics[1], QUIET)
    assert rig.nics(spec.server) == [nics[0].mac, nics[2].mac]
    libvirt.close()


def test_guest_that_is_made_anew_has_the_interfaces_of_its_spec(rig: Rig) -> None:
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


def test_create_repeated_with_other_interfaces_ends_with_those(plugging: Rig) -> None:
    rig, driver = plugging, plugging.driver
    first, second, third = (rig.interface() for _ in range(3))
    spec = rig.boot(ready=True, interfaces=[first, second])
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
def test_interface_keeps_its_place_on_the_bus_when_its_guest_is_described_anew(
    rig: Rig, private_libvirtd: Path
) -> None:
    from compute_agent.virt.libvirt.domains.connection import Connection

    libvirt = Connection(libvirtd.uri(private_libvirtd))
    first, second, third = (rig.interface() for _ in range(3))
    spec = rig.boot(interfaces=[first])
    rig.driver.attach_interface(spec.server, 2, second, QUIET)
    before = interface_xml.addresses(libvirt.describe(spec.server))
    assert interface_xml.addresses(libvirt.describe(spec.server, stored=True)) == before
    whole = replace(spec, interfaces=[third, first, second])
    for fence in (3, 5):
        rig.driver.rescue(replace(whole, fence=fence), rig.image, rig.read_image, QUIET)
        rig.driver.unrescue(replace(whole, fence=fence + 1), QUIET)
    after = interface_xml.addresses(libvirt.describe(spec.server))
    assert {mac: after[mac] for mac in before} == before and set(after) == {*before, third.mac}
    libvirt.close()


def test_guest_may_be_started_with_its_processors_paused(rig: Rig) -> None:
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


def test_guest_waits_for_its_bridge(plugging: Rig) -> None:
    rig, phases = plugging, Phases()

    def told(progress: CommandProgress) -> None:
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
        rig.driver.ensure_guest(spec, rig.read_image, VerbContext(told, lambda: False)).power_state
        == RUNNING
    )
    assert phases.count("waiting for the network") == 2
    missing, phases[:] = rig.name_bridge(), []
    late = rig.interface(missing)
    rig.driver.attach_interface(spec.server, 2, late, VerbContext(told, lambda: False))
    assert phases.count("waiting for the network") == 2 and late.mac in rig.nics(spec.server)


def test_start_waits_for_a_bridge_that_has_gone(plugging: Rig) -> None:
    rig, phases = plugging, Phases()
    bridge = rig.name_bridge()
    rig.make_bridge(bridge)
    spec = rig.boot(interfaces=[rig.interface(bridge)])
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    remove_bridge(rig, bridge)

    def told(progress: CommandProgress) -> None:
        phases.append(phase := str(progress))
        if phase == "waiting for the network":
            rig.make_bridge(bridge)

    assert (
        rig.driver.ensure_running(spec.server, 3, VerbContext(told, lambda: False)).power_state
        == RUNNING
    )
    assert "waiting for the network" in phases


@pytest.fixture
def helped(plugging: Rig, tmp_path: Path) -> Rig:
    """A host that makes bridges of networks itself, as beside Neutron's Linux bridge agents."""
    if plugging.real:
        plugging.restart(bridges=start_helper(tmp_path))
    else:
        plugging.restart(makes_bridges=True)
    return plugging


def test_host_makes_bridges_of_networks_itself(helped: Rig) -> None:
    rig, phases = helped, Phases()
    quiet = VerbContext(phases, lambda: "waiting for the network" in phases)
    first, second, third = (rig.name_bridge(f"brq{str(uuid.uuid4())[:11]}") for _ in range(3))
    nics = [rig.interface(first), rig.interface(second)]
    spec = rig.spec(interfaces=nics)
    assert rig.driver.ensure_guest(spec, rig.read_image, quiet).power_state == RUNNING
    late = rig.interface(third)
    rig.driver.attach_interface(spec.server, 2, late, quiet)
    assert set(rig.nics(spec.server)) == {nic.mac for nic in [*nics, late]}
    # The host is started anew: its bridges are gone, the guest is defined.
    rig.driver.ensure_stopped(spec.server, 3, 0, QUIET)
    for name in (first, second, third):
        remove_bridge(rig, name)
    assert rig.driver.ensure_running(spec.server, 4, quiet).power_state == RUNNING
    assert set(rig.nics(spec.server)) == {nic.mac for nic in [*nics, late]}
    # A name that is not made of a network's id is another's.
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
def test_port_that_cannot_be_plugged_costs_nothing(rig: Rig, kind: str) -> None:
    bad = replace(rig.interface(), vif_type=kind)
    spec = rig.spec(interfaces=[rig.interface(), bad])
    with pytest.raises(VerbFailed, match=kind or "nothing") as failed:
        rig.driver.ensure_guest(spec, rig.read_image, QUIET)
    assert bad.port in str(failed.value) and failed.value.retryable is (kind == "binding_failed")
    assert rig.state(spec.server) is None and rig.files(spec.server) == []
    good = rig.boot()
    anew = replace(good, fence=2, interfaces=[bad])
    for attempt in (
        lambda: rig.driver.attach_interface(good.server, 2, bad, QUIET),
        lambda: rig.driver.rebuild(anew, rig.read_image, True, QUIET),
        lambda: rig.driver.rescue(anew, rig.image, rig.read_image, QUIET),
    ):
        with pytest.raises(VerbFailed, match=bad.port):
            attempt()
        assert rig.state(good.server) == (RUNNING, 1) and rig.nics(good.server) == []


@pytest.mark.parametrize("verb", ["attach_interface", "detach_interface"])
def test_verb_on_a_server_without_guest_fails_definitely(rig: Rig, verb: str) -> None:
    with pytest.raises(VerbFailed, match="no guest on this host"):
        getattr(rig.driver, verb)(rig.spec().server, 1, rig.interface(), QUIET)
