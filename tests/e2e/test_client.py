# SPDX-License-Identifier: Apache-2.0
"""The ``openstack`` command from PyPI against a running cloud.

A recorder checks every response of the compute API with Nova's schemas.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.recorder import Recorder
from tests.e2e.live import Live, Rest

JSON = " -f json"


@pytest.fixture(autouse=True)
def recorder(cloud: Live) -> Iterator[Recorder]:
    before = cloud.environment
    with Recorder(cloud.cloud.api_url) as recorder:
        cloud.environment = before | {"http_proxy": recorder.url, "no_proxy": "", "NO_PROXY": ""}
        yield recorder
        cloud.environment = before
    assert (recorder.faults, recorder.disagreements) == ([], [])


@pytest.fixture
def name() -> str:
    """Return a unique name, so that leftovers of a failed run do not matter."""
    return f"e2e-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def image_file(tmp_path: Path) -> Path:
    path = tmp_path / "disk.raw"
    path.write_bytes(bytes(1 << 20))
    return path


def test_openstack_lists_token_catalog_flavors_and_limits(cloud: Live) -> None:
    token, catalogue, flavors, limits = cloud.openstack(
        "token issue" + JSON,
        "catalog list" + JSON,
        "flavor list" + JSON,
        "limits show --absolute" + JSON,
    )
    assert token["project_id"] == cloud.seed.demo.session.get_project_id()
    services = {service["Type"]: service["Name"] for service in catalogue}
    assert services.keys() >= {"identity", "image"}
    # libcloud and Masakari search by name.
    assert (services["compute"], services["placement"]) == ("nova", "placement")
    assert {flavor["Name"]: flavor["RAM"] for flavor in flavors} == {
        "m1.nano": 128,
        "m1.tiny": 512,
        "m1.small": 2048,
        "m1.medium": 4096,
        "m1.large": 8192,
    }
    assert {limit["Name"]: limit["Value"] for limit in limits}["instances"] == 10


def test_openstack_image_create_list_show_and_delete(
    cloud: Live, image_file: Path, name: str
) -> None:
    image, listed, shown = cloud.openstack(
        f"image create --disk-format raw --container-format bare --file {image_file} "
        f"--property os_type=none {name}" + JSON,
        f"image list --name {name}" + JSON,
        f"image show {name}" + JSON,
    )
    assert (image["name"], shown["status"], shown["size"]) == (name, "active", 1 << 20)
    assert [image["ID"] for image in listed] == [image["id"]]
    assert cloud.openstack(f"image delete {name}", f"image list --name {name}" + JSON) == [[]]


def test_openstack_keypair_is_created_and_reaches_server(
    cloud: Live, demo: Rest, tmp_path: Path, name: str
) -> None:
    public = (
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGZvcm1hdG9ubHlub3RhcmVhbGtleWF0YWxsMDAwMDAw me@here"
    )
    (tmp_path / "key.pub").write_text(public + "\n")
    private, generated = tmp_path / "private", name + "-made"
    key_pair, listed = cloud.openstack(
        f"keypair create --public-key {tmp_path}/key.pub {name}" + JSON,
        f"keypair create --private-key {private} {generated}",
        "keypair list" + JSON,
    )
    assert key_pair["name"] == name
    assert {pair["Name"] for pair in listed} >= {name, generated}
    assert "PRIVATE KEY" in private.read_text()
    [server] = cloud.openstack(
        f"server create --flavor m1.nano --image tiny --nic none --key-name {name} "
        "--config-drive True --wait keyed" + JSON
    )
    assert "public keys 1" in demo.await_ready(server["id"])
    [key_pairs] = cloud.openstack(f"keypair delete {name} {generated}", "keypair list" + JSON)
    assert {pair["Name"] for pair in key_pairs} & {name, generated} == set()


def test_openstack_server_create_reboot_stop_start_and_delete(
    cloud: Live, demo: Rest, tmp_path: Path
) -> None:
    script = tmp_path / "user-data"
    script.write_text('#!/bin/sh\necho "kilonova tiny guest: hello from $(hostname)"\n')
    server, listed, long, shown = cloud.openstack(
        f"server create --flavor m1.nano --image tiny --nic none --user-data {script} --config-drive True "
        "--property colour=green --wait life" + JSON,
        "server list --name ^life$" + JSON,
        "server list --long --name ^life$" + JSON,
        "server show life" + JSON,
    )
    assert (server["status"], server["name"]) == ("ACTIVE", "life")
    assert [(row["ID"], row["Status"], row["Image"], row["Flavor"]) for row in listed] == [
        (server["id"], "ACTIVE", "tiny", "m1.nano")
    ]
    assert (long[0]["Power State"], long[0]["Task State"], long[0]["Host"]) == (1, None, None)
    assert (shown["properties"], shown["fault"] if "fault" in shown else None) == (
        {"colour": "green"},
        None,
    )

    demo.await_ready(server["id"])
    log, _ = cloud.type("console log show life")
    assert "kilonova tiny guest: hello from life" in log
    assert f"kilonova tiny guest: id {server['id']}" in log

    cloud.openstack("server reboot --soft --wait life")
    demo.await_ready(server["id"], times=2)
    cloud.openstack("server reboot --hard --wait life")
    demo.await_ready(server["id"], times=3)
    cloud.openstack("server stop life")
    demo.await_status(server["id"], "SHUTOFF")
    cloud.openstack("server start life")
    demo.await_status(server["id"], "ACTIVE")

    events, shown = _events(cloud, "life")
    assert [event["Action"] for event in events] == ["start", "stop", "reboot", "reboot", "create"]
    assert (shown["action"], shown["request_id"]) == ("create", events[-1]["Request ID"])
    assert {event["result"] for event in shown["events"]} == {"Success"}
    assert {event["event"] for event in shown["events"]} >= {"compute__do_build_and_run_instance"}

    assert cloud.openstack("server delete --wait life", "server list --name ^life$" + JSON) == [[]]
    assert cloud.leftovers(server["id"]) == []


def test_openstack_server_create_with_min_and_max_2_creates_pair(cloud: Live, demo: Rest) -> None:
    first, listed = cloud.openstack(
        "server create --flavor m1.nano --image tiny --nic none --min 2 --max 2 --wait pair" + JSON,
        "server list --name ^pair" + JSON,
    )
    assert sorted(row["Name"] for row in listed) == ["pair-1", "pair-2"]
    assert first["id"] in {row["ID"] for row in listed}
    # The client waits for the first server only.
    for row in listed:
        demo.await_status(row["ID"], "ACTIVE")
    assert cloud.openstack(
        "server delete --wait pair-1 pair-2", "server list --name ^pair" + JSON
    ) == [[]]


def test_openstack_admin_lists_hosts_services_providers_and_user_no_services(
    cloud: Live, recorder: Recorder
) -> None:
    hosts, services, providers = cloud.openstack(
        "hypervisor list" + JSON,
        "compute service list" + JSON,
        "resource provider list" + JSON,
        cloud="kilonova-admin",
    )
    # Watcher and Skyline read the id of a hypervisor from the placement service.
    assert {(host["ID"], host["Hypervisor Hostname"]) for host in hosts} <= {
        (provider["uuid"], provider["name"]) for provider in providers
    }
    first, second = cloud.cloud.hosts
    assert {
        (host["Hypervisor Hostname"], host["Hypervisor Type"], host["State"]) for host in hosts
    } == {(first, "QEMU", "up"), (second, "QEMU", "up")}
    assert {
        (row["Binary"], row["Status"], row["State"]) for row in services if row["Host"] != second
    } == {
        (binary, "enabled", "up") for binary in ("nova-compute", "nova-conductor", "nova-scheduler")
    }
    # The second host is disabled except in tests that enable it.
    assert {
        (row["Binary"], row["Status"], row["State"]) for row in services if row["Host"] == second
    } == {("nova-compute", "disabled", "up")}
    # The user demo must not list services.
    output, complaints = cloud.type("compute service list" + JSON)
    assert (output.strip(), complaints.count("ForbiddenException: 403")) == ("", 1)
    assert recorder.judged > 1


def _events(cloud: Live, server: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    [events] = cloud.openstack(f"server event list {server}" + JSON)
    [shown] = cloud.openstack(f"server event show {server} {events[-1]['Request ID']}" + JSON)
    return events, shown
