# SPDX-License-Identifier: Apache-2.0
"""Tests of placement from the request to the guest: groups, pinned CPUs, hosts and images.

The scheduler's proposals and the conductor's claims must agree. Otherwise servers wait for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import states
from common.domain.models import Flavor
from common.domain.service_binaries import Binary
from common.domain.wire import to_wire
from common.store import schema
from common.store.hosts import hosts, services
from common.store.servers import actions
from compute_agent.virt.memory.state.script import Fail
from tests.schemas import memory_store
from tests.workflows.frozen import register
from tests.workflows.images import Images
from tests.workflows.scenarios import PINNED, ask
from tests.workflows.simulator import FLAVOR, Cloud, Host, Time

OTHER_IMAGE = "55555555-5555-4555-8555-555555555555"


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    """Yield a cloud of three registered hosts."""
    time = Time()
    cloud = Cloud(memory_store(time), time, hosts=3)
    register(cloud)
    yield cloud
    cloud.store.close()


def count_by_host(cloud: Cloud, servers: list[str]) -> Counter[str | None]:
    return Counter(cloud.show(server).host for server in servers)


def check_failure(cloud: Cloud, server: str) -> str:
    """Check that the server is in ERROR without a host, and return the message of the fault."""
    row = cloud.show(server)
    assert (row.vm_state, row.task_state, row.host) == (states.ERROR, None, None)
    return str(row.fault["message"])


def read_sent_guests(cloud: Cloud, verb: str) -> list[dict[str, Any]]:
    return [command.args["guest"] for _, command in cloud.sent if command.verb == verb]


def set_service(cloud: Cloud, host: str, **state: Any) -> None:
    def work(tx: sa.Connection) -> None:
        uuid = tx.scalar(
            sa.select(schema.services.c.uuid).where(
                schema.services.c.host == host, schema.services.c.binary == Binary.COMPUTE
            )
        )
        services.set_state(tx, str(uuid), **state)

    cloud.store.write(work)


# --- groups ---
def test_anti_affinity_group_gets_one_server_per_host(cloud: Cloud) -> None:
    servers = cloud.create(5, group=cloud.group("anti-affinity"))
    cloud.settle()
    active_servers = [server for server in servers if cloud.show(server).vm_state == states.ACTIVE]
    assert count_by_host(cloud, active_servers) == {"h1": 1, "h2": 1, "h3": 1}
    for server in set(servers) - set(active_servers):
        assert check_failure(cloud, server).startswith("No valid host was found. 3 hosts: 3 ")
    assert cloud.findings() == []


def test_anti_affinity_group_with_max_two_per_host_gets_two_per_host(cloud: Cloud) -> None:
    servers = cloud.create(7, group=cloud.group("anti-affinity", max_server_per_host=2))
    cloud.settle()
    assert count_by_host(cloud, servers) == {"h1": 2, "h2": 2, "h3": 2, None: 1}
    assert cloud.findings() == []


def test_affinity_group_uses_one_host_and_further_creates_fail_when_full(cloud: Cloud) -> None:
    servers = cloud.create(10, group=cloud.group("affinity"), flavor=replace(FLAVOR, vcpus=2))
    cloud.settle()
    counts = count_by_host(cloud, servers)
    assert sorted(counts.values()) == [2, 8], "of two VCPUs each, on a host of sixteen"
    assert counts[None] == 2
    assert cloud.findings() == []


def test_unshelve_fails_while_anti_affinity_group_has_server_on_every_host(cloud: Cloud) -> None:
    group = cloud.group("anti-affinity")
    first = cloud.create(group=group)[0]
    cloud.settle()
    cloud.ask(first, "shelve", args={"image_id": OTHER_IMAGE, "name": "s-shelved"})
    cloud.settle()
    cloud.ask(first, "shelveOffload")
    cloud.settle()
    others = cloud.create(3, group=group)
    cloud.settle()
    assert count_by_host(cloud, others) == {"h1": 1, "h2": 1, "h3": 1}
    cloud.ask(first, "unshelve", args={"zone": None, "host": None})
    cloud.settle()
    assert cloud.show(first).vm_state == states.SHELVED_OFFLOADED
    cloud.ask(others[1], "delete")
    cloud.settle()
    cloud.ask(first, "unshelve", args={"zone": None, "host": None})
    cloud.settle()
    assert cloud.show(first).vm_state == states.ACTIVE
    assert cloud.findings() == []


# --- dedicated CPUs ---
def test_rebuild_rescue_and_unrescue_send_cpu_assignment_of_guest(cloud: Cloud) -> None:
    server, other = cloud.create(2, flavor=PINNED, host="h1")
    cloud.settle()
    assignments = {
        guest["server"]: guest["assignment"] for guest in read_sent_guests(cloud, "ensure_guest")
    }
    pins = [set(assignments[guest]["numa_nodes"][0]["pins"].values()) for guest in (server, other)]
    assert [len(cpus) for cpus in pins] == [2, 2]
    assert pins[0].isdisjoint(pins[1])
    for key, verb in (("rebuild", "rebuild"), ("rescue", "rescue"), ("unrescue", "unrescue")):
        ask(cloud, server, key)
        cloud.settle()
        assert [guest["assignment"] for guest in read_sent_guests(cloud, verb)] == [
            assignments[server]
        ], verb
    assert cloud.findings() == []


def test_create_with_dedicated_cpus_fails_with_pcpu_shortage_on_full_hosts(cloud: Cloud) -> None:
    servers = cloud.create(8, flavor=PINNED)
    cloud.settle()
    assert count_by_host(cloud, servers) == {"h1": 2, "h2": 2, "h3": 2, None: 2}
    for server in (server for server in servers if cloud.show(server).host is None):
        assert "PCPU" in check_failure(cloud, server)
    cloud.ask(next(server for server in servers if cloud.show(server).host == "h2"), "delete")
    cloud.settle()
    new_servers = cloud.create(flavor=PINNED)
    cloud.settle()
    assert count_by_host(cloud, new_servers) == {"h2": 1}
    assert cloud.findings() == []


def test_unshelve_on_other_host_assigns_cpus_and_keeps_image_properties(
    cloud: Cloud,
) -> None:
    server = cloud.create(flavor=PINNED, host="h1")[0]
    cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.servers).values(
                image={"id": OTHER_IMAGE, "properties": {"hw_disk_bus": "scsi"}},
                image_id=OTHER_IMAGE,
            )
        )
    )
    cloud.settle()
    cloud.ask(
        server,
        "shelve",
        args={"image_id": "33333333-3333-4333-8333-333333333333", "name": "s-shelved"},
    )
    cloud.settle()
    cloud.ask(server, "shelveOffload")
    cloud.settle()
    cloud.sent.clear()
    cloud.ask(server, "unshelve", args={"zone": None, "host": "h3"})
    cloud.settle()
    guest = read_sent_guests(cloud, "ensure_guest")[0]
    assert (guest["image"]["id"], guest["image"]["properties"]) == (
        "33333333-3333-4333-8333-333333333333",
        {"hw_disk_bus": "scsi"},
    )
    assert len(guest["assignment"]["numa_nodes"][0]["pins"]) == 2
    assert cloud.show(server).host == "h3"
    assert cloud.findings() == []


# --- forced and requested hosts ---
def test_create_uses_disabled_host_only_if_forced(
    cloud: Cloud,
) -> None:
    set_service(cloud, "h2", disabled=True)
    forced_server, requesting_server = (
        cloud.create(host="h2", forced=True)[0],
        cloud.create(host="h2")[0],
    )
    cloud.settle()
    assert cloud.show(forced_server).host == "h2"
    assert "disabled" in check_failure(cloud, requesting_server)
    assert cloud.create(host="h3") and cloud.settle() is None
    assert count_by_host(
        cloud,
        [
            row.id
            for row in cloud.store.read(lambda tx: tx.execute(sa.select(schema.servers.c.id)).all())
        ],
    ) == {"h2": 1, "h3": 1, None: 1}


def test_create_on_full_forced_host_fails_with_no_valid_host(cloud: Cloud) -> None:
    servers = cloud.create(2, host="h2", forced=True, flavor=Flavor("2", "whole", 16, 1024, 1))
    cloud.settle()
    assert count_by_host(cloud, servers) == {"h2": 1, None: 1}
    assert "short of VCPU" in check_failure(
        cloud, next(server for server in servers if cloud.show(server).host is None)
    )


# --- rebuilds ---
def rebuild(cloud: Cloud, server: str, properties: dict[str, str]) -> None:
    """Request a rebuild as the API does.

    The row of the server has the new image at once, and the action stores the old values.
    """
    row = cloud.show(server)
    image = {"id": OTHER_IMAGE, "disk_format": "qcow2", "properties": properties}
    cloud.ask(
        server,
        "rebuild",
        args={
            "before": {
                "image_id": row.image_id,
                "image": row.image,
                "name": row.name,
                "meta": row.meta,
            },
            "wrote": {"name": "new", "meta": {"a": "1"}},
        },
        changes={"image_id": OTHER_IMAGE, "image": image, "name": "new", "meta": {"a": "1"}},
    )
    assert cloud.show(server).name == "new"


def test_rebuild_leaves_server_unchanged_when_host_cannot_run_image(
    cloud: Cloud,
) -> None:
    server = cloud.create()[0]
    cloud.settle()
    before = cloud.show(server)
    cloud.sent.clear()
    rebuild(cloud, server, {"img_hv_type": "hyperv"})
    cloud.settle()
    after = cloud.show(server)
    assert (
        after.vm_state,
        after.task_state,
        after.fault,
        after.image_id,
        after.image,
        after.name,
    ) == (states.ACTIVE, None, None, before.image_id, before.image, "s")
    action = cloud.store.read(lambda tx: actions.list_for(tx, server))[0]
    assert action.state == "failed"
    assert action.message.startswith("No valid host was found. 3 hosts: ")
    assert cloud.sent == []
    assert cloud.findings() == []


def test_rebuild_failed_for_unfit_image_keeps_concurrent_metadata_change(cloud: Cloud) -> None:
    server = cloud.create()[0]
    cloud.settle()
    before = cloud.show(server)
    rebuild(cloud, server, {"img_hv_type": "hyperv"})
    cloud.store.write(lambda tx: tx.execute(sa.update(schema.servers).values(meta={"b": "2"})))
    cloud.settle()
    after = cloud.show(server)
    assert (after.task_state, after.image_id, after.name, after.meta) == (
        None,
        before.image_id,
        "s",
        {"b": "2"},
    )


def test_rebuild_leaves_server_unchanged_when_image_property_is_invalid(cloud: Cloud) -> None:
    server = cloud.create()[0]
    cloud.settle()
    rebuild(cloud, server, {"hw_mem_page_size": "nonsense"})
    cloud.settle()
    after = cloud.show(server)
    assert (after.vm_state, after.task_state, after.image_id, after.name) == (
        states.ACTIVE,
        None,
        None,
        "s",
    )
    action = cloud.store.read(lambda tx: actions.list_for(tx, server))[0]
    assert (action.state, "hw_mem_page_size" in action.message) == ("failed", True)
    assert cloud.findings() == []


def test_rebuild_succeeds_on_full_disabled_host(cloud: Cloud) -> None:
    """A rebuild checks only the filters for the image."""
    server = cloud.create(host="h2", flavor=Flavor("2", "whole", 16, 1024, 1))[0]
    cloud.settle()
    set_service(cloud, "h2", disabled=True)
    cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.providers).values(failures=9, failed_at=cloud.time())
        )
    )
    rebuild(cloud, server, {"os_type": "linux"})
    cloud.settle()
    after = cloud.show(server)
    assert (after.vm_state, after.image_id, after.name, after.host) == (
        states.ACTIVE,
        OTHER_IMAGE,
        "new",
        "h2",
    )
    assert cloud.findings() == []


# --- hosts with failed builds ---
def break_builds(cloud: Cloud, host: str, times: int) -> None:
    cloud.hosts[host].driver.host.script["ensure_guest"] = [
        Fail("Disk full.", retryable=True)
    ] * times


def read_failures(cloud: Cloud, host: str) -> int:
    return int(
        cloud.store.read(
            lambda tx: tx.scalar(
                sa.select(schema.providers.c.failures).where(schema.providers.c.host == host)
            )
        )
        or 0
    )


def test_host_excluded_for_five_failed_builds_gets_one_server_after_300_s(
    cloud: Cloud,
) -> None:
    """After five minutes, the success of one trial build ends the exclusion."""
    break_builds(cloud, "h1", 5)
    for _ in range(5):
        cloud.create(host="h1")
        cloud.settle()
    assert read_failures(cloud, "h1") == 5
    failed_server = cloud.create(host="h1")[0]
    cloud.settle()
    assert "left out after 5 failed builds" in check_failure(cloud, failed_server)
    other_servers = cloud.create(4)
    cloud.settle()
    assert (
        count_by_host(cloud, other_servers)["h1"] == count_by_host(cloud, other_servers)[None] == 0
    )
    cloud.time.pass_by(300)
    cloud.round()
    trial_servers = cloud.create(3, host="h1")
    cloud.settle()
    assert count_by_host(cloud, trial_servers) == {"h1": 1, None: 2}, (
        "one server tries it, the others see it left out"
    )
    assert read_failures(cloud, "h1") == 0
    later_servers = cloud.create(3, host="h1")
    cloud.settle()
    assert count_by_host(cloud, later_servers) == {"h1": 3}
    assert cloud.findings() == []


def test_host_excluded_for_failed_builds_stays_excluded_when_trial_fails(cloud: Cloud) -> None:
    break_builds(cloud, "h1", 6)
    for _ in range(5):
        cloud.create(host="h1")
        cloud.settle()
    cloud.time.pass_by(301)
    cloud.round()
    cloud.create(host="h1")
    cloud.settle()
    assert read_failures(cloud, "h1") == 6
    server = cloud.create(host="h1")[0]
    cloud.settle()
    assert "failed builds" in check_failure(cloud, server)


def test_create_failed_on_every_host_counts_as_failed_build_of_no_host(cloud: Cloud) -> None:
    for host in ("h1", "h2", "h3"):
        break_builds(cloud, host, 9)
    for _ in range(6):
        server = cloud.create()[0]
        cloud.settle()
        assert cloud.show(server).vm_state == states.ERROR
    assert [read_failures(cloud, host) for host in ("h1", "h2", "h3")] == [0, 0, 0]


def test_create_retried_on_other_host_counts_failed_build_of_first_host(cloud: Cloud) -> None:
    break_builds(cloud, "h1", 9)
    servers = cloud.create(12)
    cloud.settle()
    assert count_by_host(cloud, servers)["h1"] == count_by_host(cloud, servers)[None] == 0
    assert read_failures(cloud, "h1") > 0


def test_fault_of_failed_create_contains_error_of_last_tried_host(cloud: Cloud) -> None:
    cloud.hosts["h1"].driver.host.script["ensure_guest"] = [
        Fail("Disk full.", retryable=True, details="/dev/sda1")
    ]
    server = cloud.create(host="h1")[0]
    cloud.settle()
    assert check_failure(cloud, server) == (
        "No valid host was found. 3 hosts: 2 not the requested host, 1 where the server "
        "is or was tried; the last host tried reported: Disk full."
    )
    assert "h1 reported: Disk full. /dev/sda1" in cloud.show(server).fault["details"].splitlines()


def test_create_with_permanent_failure_counts_as_failed_build_of_no_host(cloud: Cloud) -> None:
    cloud.hosts["h1"].driver.host.script["ensure_guest"] = [Fail("No such image.")] * 5
    for _ in range(5):
        cloud.create(host="h1")
        cloud.settle()
    assert read_failures(cloud, "h1") == 0


def test_create_success_resets_failed_builds_of_host(cloud: Cloud) -> None:
    break_builds(cloud, "h1", 1)
    servers = cloud.create(host="h1"), cloud.create(host="h1")
    cloud.settle()
    cloud.create(host="h1")
    cloud.settle()
    assert read_failures(cloud, "h1") == 0, servers


# --- changes of hosts ---
def test_host_with_reduced_inventory_keeps_servers_and_gets_no_new_server(cloud: Cloud) -> None:
    servers = cloud.create(3, host="h1")
    cloud.settle()
    host = cloud.hosts["h1"]
    cloud.store.write(lambda tx: hosts.describe(tx, "h1", replace(host.driver.host.size, vcpus=2)))
    assert cloud.findings() == []
    assert "short of VCPU" in check_failure(cloud, create_on_h1(cloud))
    cloud.ask(servers[0], "delete")
    cloud.settle()
    assert "short of VCPU" in check_failure(cloud, create_on_h1(cloud)), "two of two are held"
    assert cloud.findings() == []


def create_on_h1(cloud: Cloud) -> str:
    server = cloud.create(host="h1")[0]
    cloud.settle()
    return server


def test_create_in_full_anti_affinity_group_uses_newly_registered_host(cloud: Cloud) -> None:
    group = cloud.group("anti-affinity")
    cloud.create(3, group=group)
    cloud.settle()
    cloud.hosts["h4"] = Host("h4", cloud.time, Images())
    cloud.round()
    cloud.time.pass_by(6)
    server = cloud.create(group=group)[0]
    cloud.settle()
    assert cloud.show(server).host == "h4"
    assert to_wire(cloud.findings()) == []


def test_unshelve_avoids_host_with_pending_removal_of_old_guest(cloud: Cloud) -> None:
    """The recovered host must remove the old guest before the server can return to this host."""
    server = cloud.create()[0]
    cloud.settle()
    cloud.ask(server, "shelve", args={"image_id": OTHER_IMAGE, "name": "s-shelved"})
    cloud.settle()
    host = cloud.show(server).host
    cloud.hosts[host].driver.host.script["ensure_absent"] = [Fail("busy")] * 100
    cloud.ask(server, "shelveOffload")
    run_rounds(cloud, 40)
    for requested_host, state, new_host in (
        (host, states.SHELVED_OFFLOADED, None),
        (None, states.ACTIVE, "another"),
    ):
        cloud.ask(server, "unshelve", args={"zone": None, "host": requested_host})
        run_rounds(cloud, 10)
        row = cloud.show(server)
        assert (row.vm_state, row.task_state) == (state, None)
        assert (row.host is None) == (new_host is None) and row.host != host
    cloud.hosts[host].driver.host.script.clear()
    cloud.settle()
    assert cloud.findings() == []


def run_rounds(cloud: Cloud, count: int) -> None:
    for _ in range(count):
        cloud.round()
