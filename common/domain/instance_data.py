# SPDX-License-Identifier: Apache-2.0
"""What a guest may know of itself: the one maker of the trees of its config drive and of the
metadata service.

``guest_spec`` takes the facts from a server's row, for the conductor (whose command carries them to
the host) and for the metadata service; ``InstanceData`` puts them into the words of OpenStack and
of EC2, version by version, in the layout that cloud-init, cloudbase-init and Ignition read. Pure:
whoever needs chance or a file brings it along. Must stay true: both ways tell the same, except what
only the drive carries (admin password, files, chosen once); what a tenant wrote is data, never a
path.
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
#: The OpenStack versions that guests ask for.
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
#: Each document, and each later key of meta_data.json and EC2's meta-data, with the first version
#: that has it.
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
#: Types of links by vif_type, where the two differ. cloud-init refuses unknown types.
LINK_TYPES = {"": "bridge", OVS_HYBRID: "ovs"}


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of the EC2 tree; ``shown``: what the list of its parent calls it, its name and a
    slash by default."""

    items: dict[str, Node]
    shown: str = ""


Node = Folder | list[str] | str | int | bytes


def group_names(interfaces: Iterable[JsonObject], asked: Iterable[JsonObject]) -> list[str]:
    """The security groups of a server's ports, port by port; of ports whose groups are not known,
    those that its request asked for."""
    known = [one.get("groups") for one in interfaces]
    return (
        [group["name"] for group in asked]
        if None in known
        else [name for names in known for name in names or ()]
    )


class GuestFacts(Protocol):
    """What a guest is made of, as its server's row has it, JSON columns read."""

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
    """The guest of a server's row; with ``image`` made of another
    than its own.
    ``boot_roles``: of who asked for the server."""
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


def _dedicated(spec: GuestSpec) -> list[int]:
    """The guest's CPUs that have a CPU of the host each for themselves."""
    try:
        return sorted(hardware(spec.flavor, spec.image.properties if spec.image else {}).dedicated)
    except errors.BadRequest:
        return []  # a guest from before these were checked still has its metadata


def _key_type(data: str | None) -> str:
    return "x509" if (data or "").lstrip().startswith("-----BEGIN CERTIFICATE") else "ssh"


@dataclass(frozen=True, slots=True)
class InstanceData:
    """The documents and trees of one guest. ``vendor`` is what the operator tells all guests, None:
    that is not told; ``dynamic`` gives what the operator's services tell this one, by their
    names."""

    spec: GuestSpec
    vendor: JsonObject | None = field(default_factory=dict)
    dynamic: Callable[[], JsonObject] = dict

    @property
    def user_data(self) -> bytes:
        """What the tenant gave for the guest, as it was before base64; b"" for nothing."""
        return base64.b64decode(self.spec.user_data) if self.spec.user_data else b""

    @property
    def hostname(self) -> str:
        """What the guest should call itself; the API has made it from the name, else the id
        does."""
        return str(self.spec.instance.get("hostname") or f"server-{self.spec.server}")

    def names(self, version: str) -> list[str]:
        """The documents of an OpenStack version, in the order of their age."""
        return [
            name
            for name, since in DOCUMENTS.items()
            if since <= version
            and (name != USER_DATA or self.user_data)
            and (name != VENDOR_DATA or self.vendor is not None)
        ]

    def document(self, version: str, name: str, random_seed: bytes) -> bytes:
        """One of ``names``, except the password, which is not ours to tell."""
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
        """What the operator's services are told of the guest: nothing that is secret but its user
        data."""
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
        """The ``meta_data.json`` of this version; ``random_seed`` feeds the guest's entropy
        pool."""
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
            "dedicated_cpus": _dedicated(self.spec),
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
                {"path": item["path"], "content_path": f"/{_content(number)}"}
                for number, item in enumerate(instance["files"])
            ]
        return data

    def ec2(self, version: str) -> Folder:
        """What lies under a version of EC2's tree."""
        held = {
            name: value for name, value in self._ec2().items() if EC2_KEYS.get(name, "") <= version
        }
        items: dict[str, Node] = {"meta-data": Folder(held)}
        if self.user_data:
            items["user-data"] = self.user_data
        return Folder(items)

    def drive(self, random_seed: bytes) -> dict[str, bytes]:
        """What a config drive holds: path -> content."""
        tree = {
            f"openstack/{version}/{name}": self.document(version, name, random_seed)
            for version in VERSIONS
            for name in self.names(version)
            if name != PASSWORD
        }
        for number, item in enumerate(self.spec.instance.get("files") or ()):
            tree[f"openstack/{_content(number)}"] = base64.b64decode(item["contents"])
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
        found: dict[str, Node] = {
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
            found["public-keys"] = Folder(
                {
                    str(number): Folder(
                        {"openssh-key": key["data"]}, f"{number}={_line(key['name'])}"
                    )
                    for number, key in enumerate(keys)
                }
            )
        return found

    def _ssh_keys(self) -> list[dict[str, str]]:
        return [
            key for key in self.spec.instance.get("keys") or () if key.get("type", "ssh") == "ssh"
        ]


def find(node: Node, parts: Iterable[str]) -> Node | None:
    """What lies at this path of an EC2 tree."""
    for part in parts:
        if not isinstance(node, Folder) or part not in node.items:
            return None
        node = node.items[part]
    return node


def text(node: Node) -> bytes:
    """A node of an EC2 tree as its readers expect it: a folder as the list of what is in it, one
    name a line."""
    if isinstance(node, Folder):
        return "\n".join(_shown(name, node.items[name]) for name in sorted(node.items)).encode()
    if isinstance(node, list):
        return "\n".join(node).encode()
    return node if isinstance(node, bytes) else str(node).encode()


def _shown(name: str, node: Node) -> str:
    return (node.shown or f"{name}/") if isinstance(node, Folder) else name


def network_data(interfaces: Sequence[Interface]) -> JsonObject:
    """The ``network_data.json``: how the guest should set its interfaces up."""
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
                continue  # one lease brings all addresses of its kind
            leased.add(network["type"])
            networks.append(network)
            services += [service for service in _dns(address) if service not in services]
    return {"links": links, "networks": networks, "services": services}


def _network(address: JsonObject) -> JsonObject:
    """An address as the guest comes by it: leased, made up from the router's word (IPv6), or told
    here."""
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
    """Interfaces that their user gave a tag. Where they sit is known to the host only once the
    guest runs."""
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
    """Volumes that their user gave a tag; the guest finds each by its serial."""
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


def _content(number: int) -> str:
    """Where a file that was given at creation lies on the drive; its own path stays data."""
    return f"content/{number:04d}"


def _ec2_id(kind: str, uuid: str) -> str:
    """An id in EC2's form, the same for the same thing whoever makes it."""
    return f"{kind}-{uuid.replace('-', '')[:17]}"


def _line(name: str) -> str:
    return "".join(letter for letter in name if letter.isprintable())


def _plain(node: Node) -> JsonValue:
    return (
        {name: _plain(item) for name, item in node.items.items()}
        if isinstance(node, Folder)
        else node
    )


def _json(data: object) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode()
