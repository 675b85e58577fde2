# SPDX-License-Identifier: Apache-2.0
"""The facts that every virt driver stores about a server.

From these facts adopt creates the server's record. The tests run on a host in memory, libvirt's
mock-up and real QEMU. The guests do not need to boot.
"""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from common.domain.models import Flavor, GuestSpec, Interface
from common.domain.server_facts import HostedServer, facts_of
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.memory.driver import MemoryDriver
from tests.contract.virt_pairs import LARGER
from tests.contract.virt_rigs import KEYS, QUIET, Rig, another

OWNER = {
    "hostname": "web-1",
    "project_id": "6e4ea5f4bd2c4ba2a1f7a0a4a80a5b3f",
    "availability_zone": "nova",
    "keys": KEYS,
    "security_groups": ["default", "naïve <web>"],
    "reservation_id": "r-abc",
    "launch_index": 3,
    "root_device_name": "/dev/vda",
    "meta": {"secret": "of the tenant"},
    "admin_pass": "never",
}
RECORD = {
    "user_id": "u1",
    "created_at": 1_795_402_416_000_000,
    "pinned_availability_zone": "west",
    "disks": {"swap_mb": 0},
}


def create_guest(rig: Rig, *interfaces: Interface) -> GuestSpec:
    spec = rig.spec(
        name='</facts> "naïve" \x00 ]]>',
        instance=OWNER,
        record=RECORD,
        interfaces=list(interfaces),
        paused=True,
        flavor=Flavor("1", "m1.nano", 1, 128, 1, extra_specs={"hw:cpu_sockets": "1"}, number=7),
    )
    rig.driver.ensure_guest(spec, rig.read_image, QUIET)
    return replace(spec, paused=False)


def read_facts(rig: Rig, spec: GuestSpec) -> HostedServer:
    return rig.driver.server_facts(spec.server)


def test_server_facts_contain_owner_flavor_and_image_without_secrets(rig: Rig) -> None:
    spec = create_guest(rig)
    facts = read_facts(rig, spec)
    assert facts == facts_of(spec)
    assert (facts.name, facts.project_id, facts.user_id) == (
        spec.name,
        OWNER["project_id"],
        "u1",
    )
    assert facts.flavor == spec.flavor and facts.image == spec.image and facts.config_drive
    assert (facts.key_name, facts.key_data) == ("mine", "ssh-ed25519 AAAA me")
    assert not [word for word in ("of the tenant", "never") if word in repr(facts)]
    rig.restart()
    assert read_facts(rig, spec) == facts


def test_server_facts_survive_pause_stop_start_and_suspend(rig: Rig) -> None:
    spec = create_guest(rig)
    driver, facts = rig.driver, read_facts(rig, spec)
    driver.ensure_paused(spec.server, 2, QUIET)
    driver.ensure_stopped(spec.server, 3, 0, QUIET)
    driver.ensure_running(spec.server, 4, QUIET)
    assert read_facts(rig, spec) == facts
    driver.ensure_suspended(spec.server, 5, QUIET)
    assert read_facts(rig, spec) == replace(facts, is_suspended=True)


def test_server_facts_follow_resize_and_rebuild(rig: Rig) -> None:
    spec = create_guest(rig)
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    larger = replace(spec, fence=3, flavor=LARGER, name="renamed")
    rig.driver.resize_here(larger, False, QUIET)
    assert read_facts(rig, spec) == facts_of(larger)
    rig.driver.settle_resize(replace(larger, fence=4), False, 3, QUIET)
    assert read_facts(rig, spec) == facts_of(larger)
    rebuilt = replace(larger, fence=5, image=another(rig), name="rebuilt")
    rig.driver.rebuild(rebuilt, rig.read_image, False, QUIET)
    assert read_facts(rig, spec) == facts_of(rebuilt)


def test_server_facts_of_rescued_guest_contain_own_image(rig: Rig) -> None:
    spec = create_guest(rig)
    rescue = replace(spec, fence=2)
    rig.driver.rescue(rescue, another(rig), rig.read_image, QUIET)
    assert read_facts(rig, spec) == replace(facts_of(spec), is_rescued=True)
    rig.driver.unrescue(replace(spec, fence=3), QUIET)
    assert read_facts(rig, spec) == facts_of(spec)


def test_server_facts_list_attached_interfaces_with_tags(rig: Rig) -> None:
    if rig.kind == "test":
        pytest.skip("libvirt's mock-up plugs nothing in")
    first, second = replace(rig.interface(), tag="first"), replace(rig.interface(), tag="second")
    spec = create_guest(rig, first)
    assert read_facts(rig, spec).ports == {first.port: "first"}
    rig.driver.ensure_stopped(spec.server, 2, 0, QUIET)
    for _ in range(2):
        rig.driver.attach_interface(spec.server, 3, second, QUIET)
    assert read_facts(rig, spec).ports == {first.port: "first", second.port: "second"}
    for _ in range(2):
        rig.driver.detach_interface(spec.server, 4, first, QUIET)
    assert read_facts(rig, spec) == replace(facts_of(spec), ports={second.port: "second"})


def test_unreadable_server_facts_raise_verb_failed(rig: Rig) -> None:
    if isinstance(rig.driver, MemoryDriver):
        pytest.skip("a host in memory has no metadata of a domain")
    from compute_agent.virt.libvirt.driver import LibvirtDriver

    assert isinstance(rig.driver, LibvirtDriver)
    spec = create_guest(rig)
    rig.driver._libvirt.mark(spec.server, facts='{"flavor": 3}')
    with pytest.raises(VerbFailed, match="cannot be read"):
        read_facts(rig, spec)


def test_server_facts_of_missing_guest_raise_verb_failed(rig: Rig) -> None:
    with pytest.raises(VerbFailed):
        rig.driver.server_facts(str(uuid.uuid4()))
