# SPDX-License-Identifier: Apache-2.0
"""The metadata of a guest: the trees of the config drive and of the metadata service. Pure.

``guest_spec`` reads the facts from a server's row, for the conductor (to send them to
the host) and for the metadata service. ``InstanceData`` builds the documents of OpenStack and EC2
for each version, in the layout that cloud-init, cloudbase-init and Ignition read. Callers pass
random numbers and file contents.

Invariant: drive and service give the same data. Only the admin password and the files are on the
drive alone. Text of tenants is data, never a path.
"""

from __future__ import annotations

import base64
import ipaddress
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.domain import device_names, errors, local_disks
from common.domain.hardware import hardware
from common.domain.json_types import JsonObject, JsonValue
from common.domain.models import OVS_HYBRID, AttachedVolume, Flavor, GuestSpec, ImageRef, Interface
from common.domain.wire import from_wire

LATEST = "latest"
#: The OpenStack versions that guests can request.
VERSIONS = (
    "2012-08-10",
    "2013-04-04",
    "2013-10-17",
    "2015-10-15",
    "2016-06-30",
    "2016-10-06",
    "2017-02-22",
    "2018-08-27",
    "2020-10-14",
    "2025-04-04",
    LATEST,
)
EC2_VERSIONS = (
    "1.0",
    "2007-01-19",
    "2007-03-01",
    "2007-08-29",
    "2007-10-10",
    "2007-12-15",
    "2008-02-01",
    "2008-09-01",
    "2009-04-04",
    LATEST,
)
META_DATA, USER_DATA, PASSWORD, VENDOR_DATA = (
    "meta_data.json",
    "user_data",
    "password",
    "vendor_data.json",
)
#: The first version with each document. ``KEYS`` and ``EC2_KEYS`` have the same for keys of
#: meta_data.json and of EC2's meta-data that came later.
DOCUMENTS = {
    META_DATA: "2012-08-10",
    USER_DATA: "2012-08-10",
    PASSWORD: "2013-04-04",
    VENDOR_DATA: "2013-10-17",
    "network_data.json": "2015-10-15",
    "vendor_data2.json": "2016-10-06",
}
KEYS = {
    "random_seed": "2013-04-04",
    "project_id": "2015-10-15",
    "devices": "2016-06-30",
    "dedicated_cpus": "2020-10-14",
}
EC2_KEYS = {
    "local-hostname": "2007-01-19",
    "public-hostname": "2007-01-19",
    "public-ipv4": "2007-01-19",
    "instance-type": "2007-08-29",
    "block-device-mapping": "2007-12-15",
    "placement": "2008-02-01",
    "instance-action": "2008-09-01",
}
SEED_BYTES = 512
#: vif_type -> type of the link where the two differ. cloud-init refuses unknown types.
LINK_TYPES = {"": "bridge", OVS_HYBRID: "ovs"}


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of the EC2 tree.

    ``shown`` is the entry in the list of the parent folder. Empty: the name and a slash.
    """

    items: dict[str, Node]
    shown: str = ""


Node = Folder | list[str] | str | int | bytes


def group_names(interfaces: Iterable[JsonObject], requested: Iterable[JsonObject]) -> list[str]:
    """Return the names of the security groups of a server's ports, port by port, with repetitions.

    If the groups of any port are unknown, return only the names in ``requested``, the groups of the
    server's create request.
    """
    groups_by_port = [interface.get("groups") for interface in interfaces]
    return (
        [group["name"] for group in requested]
        if None in groups_by_port
        else [name for names in groups_by_port for name in names or ()]
    )


class GuestFacts(Protocol):
    """The columns of a server's row that describe its guest. JSON columns are decoded."""

    id: str
    project_id: str
    name: str
    hostname: str
    availability_zone: str | None
    launch_index: int
    meta: dict[str, str]
    key_name: str | None
    key_data: str | None
    flavor: JsonObject
    image: JsonObject | None
    config_drive: bool
    user_data: str | None
    interfaces: list[JsonObject] | None
    security_groups: list[JsonObject]
    reservation_id: str
    root_device_name: str | None
    disks: JsonObject | None


def guest_spec(
    row: GuestFacts,
    fence: int,
    image: ImageRef | None = None,
    *,
    availability_zone: str | None = None,
    files: Sequence[JsonObject] = (),
    admin_pass: str = "",
    boot_roles: Sequence[str] = (),
) -> GuestSpec:
    """Return the guest spec of a server's row, without volumes and shares, which callers add.

    Args:
        row: The row of the server.
        fence: The fence of the guest.
        image: Build the guest from this image. None: from the server's own.
        availability_zone: The zone of the guest. None: the zone in the row.
        files: Files for the config drive, as {path, contents}.
        admin_pass: The password for the guest, or "".
        boot_roles: Roles of the user that created the server.
    """
    keys = (
        [{"name": row.key_name, "type": _key_type(row.key_data), "data": row.key_data}]
        if row.key_name
        else []
    )
    instance: JsonObject = {
        "name": row.name,
        "hostname": row.hostname,
        "project_id": row.project_id,
        "availability_zone": availability_zone or row.availability_zone,
        "launch_index": row.launch_index,
        "meta": row.meta,
        "keys": keys,
        "files": list(files),
        "reservation_id": row.reservation_id,
        "security_groups": list(
            dict.fromkeys(group_names(row.interfaces or (), row.security_groups or ()))
        ),
        "root_device_name": row.root_device_name,
    }
    if boot_roles:
        instance["boot_roles"] = ",".join(boot_roles)
    if admin_pass:
        instance["admin_pass"] = admin_pass
    flavor = from_wire(Flavor, row.flavor)
    return GuestSpec(
        server=row.id,
        fence=fence,
        name=row.name,
        flavor=flavor,
        disks=local_disks.of(flavor, row.disks),
        image=image or (from_wire(ImageRef, row.image) if row.image else None),
        config_drive=bool(row.config_drive),
        user_data=row.user_data,
        instance=instance,
        interfaces=[from_wire(Interface, interface) for interface in row.interfaces or ()],
    )


def _dedicated_cpus(spec: GuestSpec) -> list[int]:
    """Return the guest CPUs that have a host CPU each. Empty if hardware options are invalid."""
    try:
        return sorted(hardware(spec.flavor, spec.image.properties if spec.image else {}).dedicated)
    except errors.BadRequest:
        return []  # Guests from before this check still need their metadata.


def _key_type(data: str | None) -> str:
    return "x509" if (data or "").lstrip().startswith("-----BEGIN CERTIFICATE") else "ssh"


@dataclass(frozen=True, slots=True)
class InstanceData:
    """The documents and trees of one guest.

    ``vendor`` is the operator's static data for all guests, or None to leave it out. ``dynamic``
    returns the data of the operator's services for this guest, by the services' names.
    """

    spec: GuestSpec
    vendor: JsonObject | None = field(default_factory=dict)
    dynamic: Callable[[], JsonObject] = dict

    @property
    def user_data(self) -> bytes:
        """The decoded user data, or b"" without any."""
        return base64.b64decode(self.spec.user_data) if self.spec.user_data else b""

    @property
    def hostname(self) -> str:
        """The host name of the guest. Without one in the spec, ``server-`` and the server's id."""
        return str(self.spec.instance.get("hostname") or f"server-{self.spec.server}")

    def names(self, version: str) -> list[str]:
        """Return the names of the documents of an OpenStack version, oldest document first.

        ``user_data`` is left out without user data, and ``vendor_data.json`` if ``vendor`` is None.
        """
        return [
            name
            for name, since in DOCUMENTS.items()
            if since <= version
            and (name != USER_DATA or self.user_data)
            and (name != VENDOR_DATA or self.vendor is not None)
        ]

    def document(self, version: str, name: str, random_seed: bytes) -> bytes:
        """Return the content of a document of an OpenStack version.

        Errors of ``dynamic``, which vendor_data2.json calls, are passed on.

        Args:
            version: A version in ``VERSIONS``.
            name: A name in ``names(version)``, except the password.
            random_seed: Bytes for the guest's entropy pool.
        """
        if name == USER_DATA:
            return self.user_data
        makers: JsonObject = {
            META_DATA: lambda: self.meta_data(version, random_seed),
            VENDOR_DATA: lambda: self.vendor,
            "vendor_data2.json": self._vendor_data2,
            "network_data.json": lambda: network_data(self.spec.interfaces),
        }
        return _json(makers[name]())

    def _vendor_data2(self) -> JsonObject:
        return self.dynamic() if self.vendor is None else {"static": self.vendor, **self.dynamic()}

    def facts(self) -> JsonObject:
        """Return the facts about the guest that the operator's vendor data services get.

        The user data is included. The admin password, keys and files are left out.
        """
        instance = self.spec.instance
        return {
            "project-id": instance.get("project_id"),
            "instance-id": self.spec.server,
            "image-id": self.spec.image.id if self.spec.image else None,
            "user-data": self.spec.user_data,
            "hostname": self.hostname,
            "metadata": instance.get("meta") or {},
            "boot-roles": instance.get("boot_roles", ""),
        }

    def meta_data(self, version: str, random_seed: bytes) -> JsonObject:
        """Return the ``meta_data.json`` of this OpenStack version, without keys of later versions.

        ``random_seed`` contains bytes for the guest's entropy pool.
        """
        instance = self.spec.instance
        data: JsonObject = {
            "uuid": self.spec.server,
            "name": self.spec.name,
            "hostname": self.hostname,
            "launch_index": instance.get("launch_index", 0),
            "availability_zone": instance.get("availability_zone"),
            "random_seed": base64.b64encode(random_seed).decode(),
            "project_id": instance.get("project_id"),
            "devices": [*_devices(self.spec.interfaces), *_tagged_volumes(self.spec.volumes)],
            "dedicated_cpus": _dedicated_cpus(self.spec),
        }
        data = {name: value for name, value in data.items() if KEYS.get(name, "") <= version}
        if instance.get("meta"):
            data["meta"] = instance["meta"]
        keys: list[dict[str, str]] = instance.get("keys") or []
        if keys:
            data["keys"] = [
                {"name": key["name"], "type": key.get("type", "ssh"), "data": key["data"]}
                for key in keys
            ]
        if ssh := {key["name"]: key["data"] for key in self._ssh_keys()}:
            data["public_keys"] = ssh
        if instance.get("admin_pass"):
            data["admin_pass"] = instance["admin_pass"]
        if instance.get("files"):
            data["files"] = [
                {"path": item["path"], "content_path": f"/{_content_path(number)}"}
                for number, item in enumerate(instance["files"])
            ]
        return data

    def ec2(self, version: str) -> Folder:
        """Return the folder of an EC2 version: meta-data, and user-data if the guest has any.

        Keys of later versions are left out of meta-data.
        """
        keys = {
            name: value for name, value in self._ec2().items() if EC2_KEYS.get(name, "") <= version
        }
        items: dict[str, Node] = {"meta-data": Folder(keys)}
        if self.user_data:
            items["user-data"] = self.user_data
        return Folder(items)

    def drive(self, random_seed: bytes) -> dict[str, bytes]:
        """Return path -> content of the files on a config drive.

        Errors of ``dynamic`` are passed on. ``random_seed`` contains bytes for the guest's entropy
        pool.
        """
        tree = {
            f"openstack/{version}/{name}": self.document(version, name, random_seed)
            for version in VERSIONS
            for name in self.names(version)
            if name != PASSWORD
        }
        for number, item in enumerate(self.spec.instance.get("files") or ()):
            tree[f"openstack/{_content_path(number)}"] = base64.b64decode(item["contents"])
        for version in EC2_VERSIONS[-2:]:
            tree[f"ec2/{version}/meta-data.json"] = _json(
                _plain(self.ec2(version).items["meta-data"])
            )
            if self.user_data:
                tree[f"ec2/{version}/user-data"] = self.user_data
        return tree

    def _ec2(self) -> dict[str, Node]:
        spec, instance, name = self.spec, self.spec.instance, self.hostname
        local = [
            address
            for interface in spec.interfaces
            for address in interface.addresses
            if address.get("version") == 4
        ]
        public = [floating for address in local for floating in address.get("floating") or ()]
        bus = spec.image.properties.get("hw_disk_bus") if spec.image else None
        root = str(instance.get("root_device_name") or device_names.root_name(bus))
        zone = instance.get("availability_zone") or ""
        tree: dict[str, Node] = {
            "ami-id": _ec2_id("ami", spec.image.id) if spec.image else "",
            "ami-launch-index": int(instance.get("launch_index", 0)),
            "ami-manifest-path": "",
            "block-device-mapping": Folder(
                {
                    "ami": root.removeprefix("/dev/"),
                    "root": root,
                    **local_disks.devices(spec.disks, root, bus),
                }
            ),
            "hostname": name,
            "instance-action": "none",
            "instance-id": _ec2_id("i", spec.server),
            "instance-type": spec.flavor.name,
            "local-hostname": name,
            "local-ipv4": str(local[0]["address"]) if local else "",
            "placement": Folder({"availability-zone": zone}),
            "public-hostname": name,
            "public-ipv4": str(public[0]) if public else "",
            "reservation-id": instance.get("reservation_id") or "",
            "security-groups": list(instance.get("security_groups") or ()),
        }
        if keys := self._ssh_keys():
            tree["public-keys"] = Folder(
                {
                    str(number): Folder(
                        {"openssh-key": key["data"]}, f"{number}={_printable_line(key['name'])}"
                    )
                    for number, key in enumerate(keys)
                }
            )
        return tree

    def _ssh_keys(self) -> list[dict[str, str]]:
        return [
            key for key in self.spec.instance.get("keys") or () if key.get("type", "ssh") == "ssh"
        ]


def find(node: Node, parts: Iterable[str]) -> Node | None:
    """Return the node at this path of an EC2 tree, or None if the path does not exist."""
    for part in parts:
        if not isinstance(node, Folder) or part not in node.items:
            return None
        node = node.items[part]
    return node


def text(node: Node) -> bytes:
    """Return a node of an EC2 tree as the service answers it.

    A folder is a sorted list of its entries, one per line. The entry of a subfolder is its
    ``shown`` text, or its name with a slash. Other nodes are texts, a list has one item per line.
    """
    if isinstance(node, Folder):
        return "\n".join(
            _entry_name(name, node.items[name]) for name in sorted(node.items)
        ).encode()
    if isinstance(node, list):
        return "\n".join(node).encode()
    return node if isinstance(node, bytes) else str(node).encode()


def _entry_name(name: str, node: Node) -> str:
    return (node.shown or f"{name}/") if isinstance(node, Folder) else name


def network_data(interfaces: Sequence[Interface]) -> JsonObject:
    """Return ``network_data.json``: the network configuration of the guest's interfaces.

    Interfaces without an address are left out. Addresses of one IP version by DHCP on an interface
    share one entry.
    """
    links: list[JsonObject] = []
    networks: list[JsonObject] = []
    services: list[JsonObject] = []
    for interface in interfaces:
        if not interface.addresses:
            continue
        link = interface.device or f"interface{len(links)}"
        links.append(
            {
                "id": link,
                "vif_id": interface.port,
                "type": LINK_TYPES.get(interface.vif_type, interface.vif_type),
                "mtu": interface.mtu or None,
                "ethernet_mac_address": interface.mac,
            }
        )
        leased: set[str] = set()
        for address in interface.addresses:
            network = {
                "id": f"network{len(networks)}",
                **_network(address),
                "link": link,
                "network_id": interface.network,
            }
            if "ip_address" not in network and network["type"] in leased:
                continue  # One lease brings all addresses of its kind.
            leased.add(network["type"])
            networks.append(network)
            services += [service for service in _dns(address) if service not in services]
    return {"links": links, "networks": networks, "services": services}


def _network(address: JsonObject) -> JsonObject:
    """Return the entry of an address in ``network_data.json``, without ids and link.

    With DHCP and no IPv6 mode, the entry contains only the type, for example "ipv4_dhcp". Otherwise
    the entry contains the type with the IPv6 mode, address, netmask, routes and DNS servers.
    """
    version, kind = address["version"], address.get("ipv6_mode") or ""
    if address.get("dhcp") and not kind:
        return {"type": f"ipv{version}_dhcp"}
    routes = (
        [{"destination": "0.0.0.0/0" if version == 4 else "::/0", "nexthop": address["gateway"]}]
        if address.get("gateway")
        else []
    )
    return {
        "type": f"ipv{version}" + (f"_{kind}" if kind else ""),
        "ip_address": address["address"],
        "netmask": str(
            ipaddress.ip_network(f"{address['address']}/{address['prefix']}", strict=False).netmask
        ),
        "routes": [_route(route) for route in (*routes, *(address.get("routes") or ()))],
        "services": _dns(address),
    }


def _route(route: dict[str, str]) -> dict[str, str]:
    network = ipaddress.ip_network(route["destination"], strict=False)
    return {
        "network": str(network.network_address),
        "netmask": str(network.netmask),
        "gateway": route["nexthop"],
    }


def _dns(address: JsonObject) -> list[JsonObject]:
    return [{"type": "dns", "address": server} for server in address.get("dns") or ()]


def _devices(interfaces: Sequence[Interface]) -> list[JsonObject]:
    """Return the entries of interfaces with a tag for "devices" in ``meta_data.json``.

    The bus address is "none", because the host knows it only while the guest runs.
    """
    return [
        {
            "type": "nic",
            "bus": "none",
            "address": "none",
            "mac": interface.mac,
            "tags": [interface.tag],
        }
        for interface in interfaces
        if interface.tag
    ]


def _tagged_volumes(volumes: Sequence[AttachedVolume]) -> list[JsonObject]:
    """Return the entries of volumes with a tag for "devices" in ``meta_data.json``.

    The guest finds each volume by its serial, which is the volume's id.
    """
    return [
        {
            "type": "disk",
            "bus": "pci" if volume.bus == "virtio" else volume.bus,
            "address": "none",
            "serial": volume.volume_id,
            "tags": [volume.tag],
        }
        for volume in volumes
        if volume.tag
    ]


def _content_path(number: int) -> str:
    """Return the path below openstack/ on the config drive for a file that the tenant requested.

    The path in the request is not used here. ``number`` is the file's position in the request.
    """
    return f"content/{number:04d}"


def _ec2_id(kind: str, uuid: str) -> str:
    """Return an id in EC2's form: the kind, a dash, and the first 17 hex digits of the UUID."""
    return f"{kind}-{uuid.replace('-', '')[:17]}"


def _printable_line(name: str) -> str:
    return "".join(letter for letter in name if letter.isprintable())


def _plain(node: Node) -> JsonValue:
    return (
        {name: _plain(item) for name, item in node.items.items()}
        if isinstance(node, Folder)
        else node
    )


def _json(data: object) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode()
