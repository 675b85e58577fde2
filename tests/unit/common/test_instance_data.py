# SPDX-License-Identifier: Apache-2.0
"""Metadata of a guest: OpenStack's documents in each version, EC2's tree and the config drive."""

from __future__ import annotations

import base64
import json
import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from common.clients.network import interface_of
from common.domain.instance_data import (
    EC2_VERSIONS,
    VERSIONS,
    InstanceData,
    find,
    guest_spec,
    network_data,
    text,
)
from common.domain.models import AttachedVolume, Flavor, GuestSpec, ImageRef, Interface, LocalDisk
from common.domain.wire import to_wire

SERVER = str(uuid.UUID("6f1d2c3b-4a59-4867-9768-5a4b3c2d1e0f"))
IMAGE = str(uuid.UUID("70a599e0-31e7-49b7-b260-868f441e862b"))
KEYS = [
    {"name": "mine", "type": "ssh", "data": "ssh-ed25519 AAAA me"},
    {"name": "x", "type": "x509", "data": "PEM"},
]
V4 = {
    "address": "10.0.0.5",
    "version": 4,
    "prefix": 24,
    "subnet": "s4",
    "gateway": "10.0.0.1",
    "dns": ["1.1.1.1", "9.9.9.9"],
    "routes": [{"destination": "10.9.0.0/16", "nexthop": "10.0.0.7"}],
    "dhcp": False,
    "floating": ["172.24.4.9"],
}
V6 = {
    "address": "fd00::5",
    "version": 6,
    "prefix": 64,
    "subnet": "s6",
    "gateway": "fd00::1",
    "dns": ["1.1.1.1"],
    "routes": [],
    "dhcp": False,
    "floating": [],
}


def interface(number: int = 1, *addresses: dict[str, Any], **changed: Any) -> Interface:
    values: dict[str, Any] = {
        "port": f"port{number}",
        "network": "net1",
        "label": "private",
        "mac": f"fa:16:3e:00:00:0{number}",
        "addresses": list(addresses),
        "mtu": 1450,
        "vif_type": "bridge",
        "device": f"tap{number}",
    }
    return Interface(**{**values, **changed})


def spec(**changed: object) -> GuestSpec:
    values: dict[str, object] = {
        "server": SERVER,
        "fence": 1,
        "name": 'naïve <web> "1"',
        "flavor": Flavor("1", "m1.nano", 1, 128, 1),
        "image": ImageRef(IMAGE),
        "user_data": base64.b64encode(b"#!/bin/sh\necho \xff hello\n").decode(),
        "instance": {
            "hostname": "web-1",
            "project_id": "p1",
            "availability_zone": "nova",
            "launch_index": 3,
            "meta": {"../../etc": "a\nb"},
            "keys": KEYS,
            "reservation_id": "r-abc",
            "security_groups": ["default", "web"],
            "root_device_name": "/dev/vda",
        },
    }
    return GuestSpec(**{**values, **changed})  # type: ignore[arg-type]


def document(
    name: str, guest: GuestSpec | None = None, version: str = "latest", **more: Any
) -> Any:
    return json.loads(InstanceData(guest or spec(), **more).document(version, name, b"seed"))


def ec2(path: str, guest: GuestSpec | None = None) -> str | None:
    version, *parts = path.split("/")
    node = find(InstanceData(guest or spec()).ec2(version), parts)
    return None if node is None else text(node).decode()


def test_meta_data_describes_the_guest() -> None:
    assert document("meta_data.json") == {
        "uuid": SERVER,
        "name": 'naïve <web> "1"',
        "hostname": "web-1",
        "project_id": "p1",
        "launch_index": 3,
        "availability_zone": "nova",
        "devices": [],
        "dedicated_cpus": [],
        "meta": {"../../etc": "a\nb"},
        "random_seed": base64.b64encode(b"seed").decode(),
        "keys": KEYS,
        "public_keys": {"mine": "ssh-ed25519 AAAA me"},
    }


@pytest.mark.parametrize(
    ("version", "absent"),
    [
        ("2012-08-10", {"random_seed", "project_id", "devices", "dedicated_cpus"}),
        ("2013-04-04", {"project_id", "devices", "dedicated_cpus"}),
        ("2015-10-15", {"devices", "dedicated_cpus"}),
        ("2016-06-30", {"dedicated_cpus"}),
        ("2020-10-14", set()),
        ("latest", set()),
    ],
)
def test_meta_data_keys_depend_on_the_version(version: str, absent: set[str]) -> None:
    assert (
        set(document("meta_data.json")) - set(document("meta_data.json", version=version)) == absent
    )


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("2012-08-10", ["meta_data.json", "user_data"]),
        ("2013-04-04", ["meta_data.json", "user_data", "password"]),
        ("2013-10-17", ["meta_data.json", "user_data", "password", "vendor_data.json"]),
        (
            "2015-10-15",
            ["meta_data.json", "user_data", "password", "vendor_data.json", "network_data.json"],
        ),
        (
            "latest",
            [
                "meta_data.json",
                "user_data",
                "password",
                "vendor_data.json",
                "network_data.json",
                "vendor_data2.json",
            ],
        ),
    ],
)
def test_instance_data_document_names_depend_on_the_version(version: str, names: list[str]) -> None:
    assert InstanceData(spec()).names(version) == names
    assert InstanceData(spec(user_data=None)).names(version) == [
        name for name in names if name != "user_data"
    ]


def test_meta_data_has_admin_pass_only_if_the_guest_has_a_password() -> None:
    assert (
        document("meta_data.json", spec(instance={"admin_pass": "s3cret"}))["admin_pass"]
        == "s3cret"
    )
    assert "admin_pass" not in document("meta_data.json")


def test_instance_data_facts_for_vendor_data_services_leave_out_secrets() -> None:
    guest = spec()
    files = [{"path": "/x", "contents": "eA=="}]
    guest.instance.update(boot_roles="member,reader", admin_pass="swordfish", files=files)
    assert InstanceData(guest).facts() == {
        "project-id": "p1",
        "instance-id": SERVER,
        "image-id": IMAGE,
        "user-data": guest.user_data,
        "hostname": "web-1",
        "metadata": {"../../etc": "a\nb"},
        "boot-roles": "member,reader",
    }


def test_vendor_data_documents_contain_static_and_dynamic_data() -> None:
    assert document("vendor_data.json", vendor={"ntp": "n1"}) == {"ntp": "n1"}
    assert document("vendor_data2.json", vendor={"ntp": "n1"}) == {"static": {"ntp": "n1"}}
    assert document("vendor_data.json") == {}
    assert document(
        "vendor_data2.json", vendor={"ntp": "n1"}, dynamic=lambda: {"cmdb": {"rack": 7}}
    ) == {"static": {"ntp": "n1"}, "cmdb": {"rack": 7}}
    assert document("vendor_data2.json", vendor=None, dynamic=lambda: {"cmdb": {}}) == {"cmdb": {}}
    assert "vendor_data.json" not in InstanceData(spec(), None).names("latest")


def test_meta_data_devices_list_only_tagged_interfaces() -> None:
    guest = spec(interfaces=[interface(1, V4, tag="blue"), interface(2, V4)])
    assert document("meta_data.json", guest)["devices"] == [
        {
            "type": "nic",
            "bus": "none",
            "address": "none",
            "mac": "fa:16:3e:00:00:01",
            "tags": ["blue"],
        }
    ]


def test_meta_data_devices_list_tagged_volumes_with_serial() -> None:
    volumes = [
        AttachedVolume("v1", "/dev/vdb", 1, tag="data"),
        AttachedVolume("v2", "/dev/sda", 1, bus="scsi", tag="logs"),
        AttachedVolume("v3", "/dev/vdc", 1),
    ]
    devices = document("meta_data.json", spec(volumes=volumes))["devices"]
    assert [
        (device["type"], device["bus"], device["serial"], device["tags"]) for device in devices
    ] == [
        ("disk", "pci", "v1", ["data"]),
        ("disk", "scsi", "v2", ["logs"]),
    ]


def test_network_data_of_static_addresses_contains_addresses_and_routes() -> None:
    dns = [{"type": "dns", "address": "1.1.1.1"}, {"type": "dns", "address": "9.9.9.9"}]
    assert document("network_data.json", spec(interfaces=[interface(1, V4, V6), interface(2)])) == {
        "links": [
            {
                "id": "tap1",
                "vif_id": "port1",
                "type": "bridge",
                "mtu": 1450,
                "ethernet_mac_address": "fa:16:3e:00:00:01",
            }
        ],
        "networks": [
            {
                "id": "network0",
                "type": "ipv4",
                "link": "tap1",
                "network_id": "net1",
                "ip_address": "10.0.0.5",
                "netmask": "255.255.255.0",
                "services": dns,
                "routes": [
                    {"network": "0.0.0.0", "netmask": "0.0.0.0", "gateway": "10.0.0.1"},
                    {"network": "10.9.0.0", "netmask": "255.255.0.0", "gateway": "10.0.0.7"},
                ],
            },
            {
                "id": "network1",
                "type": "ipv6",
                "link": "tap1",
                "network_id": "net1",
                "ip_address": "fd00::5",
                "netmask": "ffff:ffff:ffff:ffff::",
                "services": dns[:1],
                "routes": [{"network": "::", "netmask": "::", "gateway": "fd00::1"}],
            },
        ],
        "services": dns,
    }


@pytest.mark.parametrize("vif_type", ["ovs", "ovs_hybrid"])
def test_network_data_of_dhcp_addresses_names_their_dhcp_or_slaac_type(vif_type: str) -> None:
    leased = {**V4, "dhcp": True}
    document_data = network_data(
        [
            interface(
                1,
                leased,
                {**leased, "address": "10.0.0.6"},
                {**V6, "dhcp": True},
                {**V6, "dhcp": True, "ipv6_mode": "slaac"},
                device="",
                mtu=0,
                vif_type=vif_type,
            )
        ]
    )
    assert document_data["links"] == [
        {
            "id": "interface0",
            "vif_id": "port1",
            "type": "ovs",
            "mtu": None,
            "ethernet_mac_address": "fa:16:3e:00:00:01",
        }
    ]
    assert [
        (network["id"], network["type"], network.get("ip_address"))
        for network in document_data["networks"]
    ] == [
        ("network0", "ipv4_dhcp", None),
        ("network1", "ipv6_dhcp", None),
        ("network2", "ipv6_slaac", "fd00::5"),
    ]


@pytest.mark.parametrize(
    ("subnet", "kind"),
    [
        ({"cidr": "fd00::/64", "enable_dhcp": True, "ipv6_address_mode": "slaac"}, "ipv6_slaac"),
        ({"cidr": "fd00::/64", "enable_dhcp": True, "ipv6_address_mode": None}, "ipv6_dhcp"),
        ({"cidr": "fd00::/64", "enable_dhcp": False}, "ipv6"),
        ({}, "ipv6"),
    ],
)
def test_network_data_type_of_ipv6_address_follows_subnet_of_port(
    subnet: dict[str, Any], kind: str
) -> None:
    port = {
        "id": "port1",
        "network_id": "net1",
        "mac_address": "fa:16:3e:00:00:01",
        "fixed_ips": [{"subnet_id": "s6", "ip_address": "fd00::5"}],
    }
    document_data = network_data([interface_of(port, {"net1": {"mtu": 1450}}, {"s6": subnet})])
    assert [network["type"] for network in document_data["networks"]] == [kind]
    assert document_data["links"][0]["mtu"] == 1450


@pytest.mark.parametrize(
    "interfaces",
    [[], [interface(1)], [interface(1, {**V4, "gateway": None, "dns": [], "routes": []})]],
)
def test_network_data_without_gateway_or_dns_has_no_routes_or_services(
    interfaces: list[Interface],
) -> None:
    document_data = network_data(interfaces)
    assert document_data["services"] == []
    assert all(network["routes"] == [] for network in document_data["networks"])


LATEST_NAMES = [
    "ami-id",
    "ami-launch-index",
    "ami-manifest-path",
    "block-device-mapping/",
    "hostname",
    "instance-action",
    "instance-id",
    "instance-type",
    "local-hostname",
    "local-ipv4",
    "placement/",
    "public-hostname",
    "public-ipv4",
    "public-keys/",
    "reservation-id",
    "security-groups",
]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("latest", "meta-data/\nuser-data"),
        ("latest/meta-data", "\n".join(LATEST_NAMES)),
        (
            "1.0/meta-data",
            "ami-id\nami-launch-index\nami-manifest-path\nhostname\ninstance-id\nlocal-ipv4\npublic-keys/\n"
            "reservation-id\nsecurity-groups",
        ),
        ("latest/user-data", None),
        ("latest/meta-data/ami-id", "ami-70a599e031e749b7b"),
        ("latest/meta-data/instance-id", "i-6f1d2c3b4a5948679"),
        ("latest/meta-data/ami-launch-index", "3"),
        ("latest/meta-data/hostname", "web-1"),
        ("latest/meta-data/local-ipv4", "10.0.0.5"),
        ("latest/meta-data/public-ipv4", "172.24.4.9"),
        ("latest/meta-data/instance-type", "m1.nano"),
        ("latest/meta-data/reservation-id", "r-abc"),
        ("latest/meta-data/security-groups", "default\nweb"),
        ("latest/meta-data/placement", "availability-zone"),
        ("latest/meta-data/placement/availability-zone", "nova"),
        ("latest/meta-data/block-device-mapping", "ami\nroot"),
        ("latest/meta-data/block-device-mapping/ami", "vda"),
        ("latest/meta-data/block-device-mapping/root", "/dev/vda"),
        ("latest/meta-data/public-keys", "0=mine"),
        ("latest/meta-data/public-keys/0", "openssh-key"),
        ("latest/meta-data/public-keys/0/openssh-key", "ssh-ed25519 AAAA me"),
        ("latest/meta-data/public-keys/1", None),
        ("2008-02-01/meta-data/instance-action", None),
        ("2008-09-01/meta-data/instance-action", "none"),
        ("latest/meta-data/hostname/x", None),
        ("latest/meta-data/../user-data", None),
        ("latest/nothing", None),
    ],
)
def test_ec2_tree_path_returns_its_value_and_unknown_path_returns_none(
    path: str, value: str | None
) -> None:
    guest = spec(interfaces=[interface(1, V6, V4)])
    if path == "latest/user-data":
        assert (
            find(InstanceData(guest).ec2("latest"), ["user-data"])
            == b"#!/bin/sh\necho \xff hello\n"
        )
        return
    assert ec2(path, guest) == value


def test_ec2_tree_of_bare_server_has_empty_ami_id_and_no_keys_or_user_data() -> None:
    bare = spec(user_data=None, image=None, instance={})
    assert ec2("latest", bare) == "meta-data/"
    assert ec2("latest/meta-data/hostname", bare) == f"server-{SERVER}"
    assert ec2("latest/meta-data/local-ipv4", bare) == ec2("latest/meta-data/ami-id", bare) == ""
    assert ec2("latest/meta-data/public-keys", bare) is None


def test_ec2_public_keys_remove_line_breaks_from_key_names() -> None:
    guest = spec(instance={"keys": [{"name": "a\nb/../c", "data": "d"}]})
    assert ec2("latest/meta-data/public-keys", guest) == "0=ab/../c"


def test_config_drive_contains_all_versions_and_no_password_document() -> None:
    tree = InstanceData(spec()).drive(b"seed")
    assert {tree[f"openstack/{version}/user_data"] for version in VERSIONS} == {
        b"#!/bin/sh\necho \xff hello\n"
    }
    assert (
        "openstack/2012-08-10/vendor_data.json" not in tree
        and "openstack/2013-10-17/vendor_data.json" in tree
    )
    assert "openstack/2015-10-15/vendor_data2.json" not in tree
    assert not any(path.endswith("/password") for path in tree)
    ec2_data = json.loads(tree["ec2/latest/meta-data.json"])
    assert ec2_data["instance-id"] == "i-6f1d2c3b4a5948679" and ec2_data["ami-launch-index"] == 3
    assert ec2_data["public-keys"] == {"0": {"openssh-key": "ssh-ed25519 AAAA me"}}
    assert (
        tree["ec2/2009-04-04/user-data"]
        == tree["ec2/latest/user-data"]
        == b"#!/bin/sh\necho \xff hello\n"
    )


def test_config_drive_contains_injected_files_named_in_meta_data() -> None:
    guest = spec()
    guest.instance["files"] = [
        {"path": "/etc/motd", "contents": base64.b64encode(b"hello").decode()},
        {"path": "../../x", "contents": ""},
    ]
    tree = InstanceData(guest).drive(b"seed")
    assert json.loads(tree["openstack/latest/meta_data.json"])["files"] == [
        {"path": "/etc/motd", "content_path": "/content/0000"},
        {"path": "../../x", "content_path": "/content/0001"},
    ]
    assert (tree["openstack/content/0000"], tree["openstack/content/0001"]) == (b"hello", b"")


def test_config_drive_of_server_without_data_has_no_empty_files() -> None:
    tree = InstanceData(spec(user_data=None, instance={})).drive(b"")
    assert all(tree.values())
    assert not any(path.endswith(("user_data", "user-data")) for path in tree)
    meta = json.loads(tree["openstack/latest/meta_data.json"])
    assert meta["hostname"] == f"server-{SERVER}"
    assert "keys" not in meta and "public_keys" not in meta and "meta" not in meta


def test_config_drive_paths_contain_no_text_of_the_tenant() -> None:
    guest = spec(name="../../../root", instance={"keys": [{"name": "../k", "data": "d"}]})
    assert all(".." not in path for path in InstanceData(guest).drive(b""))


def test_guest_spec_of_server_row_contains_all_fields() -> None:
    row = SimpleNamespace(
        id=SERVER,
        name="vm",
        hostname="vm",
        project_id="p1",
        availability_zone="z1",
        launch_index=0,
        meta={"a": "b"},
        key_name="k",
        key_data="-----BEGIN CERTIFICATE-----",
        reservation_id="r-1",
        root_device_name=None,
        security_groups=[{"name": "default"}],
        flavor=to_wire(Flavor("1", "m1", 1, 128, 1)),
        image=to_wire(ImageRef(IMAGE)),
        config_drive=1,
        user_data=None,
        interfaces=[to_wire(interface(1, V4))],
        disks=None,
    )
    guest = guest_spec(
        row, 7, files=[{"path": "/x", "contents": ""}], admin_pass="pw", availability_zone="z2"
    )
    assert (guest.server, guest.fence, guest.flavor.name, guest.config_drive) == (
        SERVER,
        7,
        "m1",
        True,
    )
    assert guest.image == ImageRef(IMAGE) and guest.interfaces == [interface(1, V4)]
    assert guest.instance == {
        "name": "vm",
        "hostname": "vm",
        "project_id": "p1",
        "availability_zone": "z2",
        "launch_index": 0,
        "meta": {"a": "b"},
        "keys": [{"name": "k", "type": "x509", "data": "-----BEGIN CERTIFICATE-----"}],
        "files": [{"path": "/x", "contents": ""}],
        "reservation_id": "r-1",
        "security_groups": ["default"],
        "root_device_name": None,
        "admin_pass": "pw",
    }
    assert guest.disks == []
    row.flavor, row.disks = (
        to_wire(Flavor("2", "m2", 1, 128, 1, ephemeral_gb=3, swap_mb=64)),
        {"swap_mb": 32},
    )
    assert guest_spec(row, 7).disks == [
        LocalDisk("ephemeral0", 3072),
        LocalDisk("swap", 32, "swap"),
    ]
    row.interfaces = row.image = row.key_name = None
    bare = guest_spec(row, 7, ImageRef("other"))
    assert (bare.image, bare.interfaces, bare.instance["keys"]) == (ImageRef("other"), [], [])
    assert "admin_pass" not in bare.instance


def test_block_device_mapping_names_local_disks() -> None:
    guest = spec(
        disks=[
            LocalDisk("ephemeral0", 1024),
            LocalDisk("ephemeral1", 1024),
            LocalDisk("swap", 64, "swap"),
        ]
    )
    mapping_path = "latest/meta-data/block-device-mapping"
    assert ec2(mapping_path, guest) == "ami\nephemeral0\nephemeral1\nroot\nswap"
    assert [
        ec2(f"{mapping_path}/{name}", guest)
        for name in ("root", "ephemeral0", "ephemeral1", "swap")
    ] == ["/dev/vda", "/dev/vdb", "/dev/vdc", "/dev/vdd"]
    drive = json.loads(InstanceData(guest).drive(b"")["ec2/latest/meta-data.json"])
    assert drive["block-device-mapping"]["swap"] == "/dev/vdd"


def test_metadata_versions_are_sorted() -> None:
    assert list(VERSIONS) == sorted(VERSIONS) and list(EC2_VERSIONS) == sorted(EC2_VERSIONS)


def test_meta_data_lists_the_dedicated_cpus() -> None:
    mixed = Flavor(
        "1",
        "mixed",
        4,
        128,
        1,
        extra_specs={"hw:cpu_policy": "mixed", "hw:cpu_dedicated_mask": "2-3"},
    )
    assert document("meta_data.json", spec(flavor=mixed))["dedicated_cpus"] == [2, 3]
    unknown = Flavor("1", "old", 1, 128, 1, extra_specs={"hw:cpu_policy": "nonsense"})
    assert document("meta_data.json", spec(flavor=unknown))["dedicated_cpus"] == []
