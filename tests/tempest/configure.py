# SPDX-License-Identifier: Apache-2.0
"""tempest.conf for a cloud that ``./deploy/up`` made: what Tempest has to know, and what it may
expect.

What is switched off has its reason in docs/tempest.md.
"""

from __future__ import annotations

import configparser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.one_machine.seed import Seed
from deploy.one_machine.services.volume.versions import MAXIMUM as VOLUMES_UNTIL

FILE = "tempest.conf"
#: Filters that Tempest's tests look for: the default ones, and two. The last knows no servers of
#: other projects.
APART = "DifferentHostFilter"
FILTERS = (
    "ComputeFilter",
    "ComputeCapabilitiesFilter",
    "ImagePropertiesFilter",
    "ServerGroupAntiAffinityFilter",
    "ServerGroupAffinityFilter",
    "SameHostFilter",
    APART,
)
#: Options of the cloud. Keystone's limits: those that are registered, each as it is at that moment.
FILTERED = (("scheduler", "enabled_filters", ", ".join(FILTERS)),)
UNIFIED = (
    ("quota", "driver", "unified"),
    ("quota", "unified_limits_resource_list", ""),
    ("quota", "unified_limits_cache_seconds", 0),
)
#: Registered limits: what no test but those of limits reaches.
LIMITS = {"servers": 1000, "class:VCPU": 1000, "class:MEMORY_MB": 1 << 24, "class:DISK_GB": 1 << 20}
SHARED = "shared-by-servers"
#: Debian's hash-bang of the tiny guest is busybox's shell, which has no pipefail.
PROLOGUE = "set -eu; PATH=$$PATH:/sbin:/usr/sbin;"


@dataclass(frozen=True)
class Cloud:
    """What Tempest is told of one: the names that its users know, and whether its guests boot."""

    auth_url: str
    admin: dict[str, str]
    image: str
    second_image: str
    flavor: str
    second_flavor: str
    public_network: str
    hosts: tuple[str, ...]
    has_guests: bool
    unified: bool
    #: The type of volumes that several servers may have; none where there is no volume service.
    shared_type: str | None
    #: The first image, for scenarios that upload it.
    image_file: Path = Path()

    @classmethod
    def of(cls, seed: Seed, image_name: str = "tiny") -> Cloud:
        """Looks the names up; a second image is made when there is none. A cloud may have no public
        network."""
        admin = seed.admin
        image, public = admin.image.find_image(image_name), admin.network.find_network("public")
        second = admin.image.find_image(f"{image_name}-2") or _copy(admin, image)
        flavors = {flavor.name: flavor.id for flavor in admin.compute.flavors()}
        return cls(
            admin.config.config["auth"]["auth_url"],
            admin.config.config["auth"],
            image.id,
            second.id,
            flavors["m1.nano"],
            flavors["m1.tiny"],
            public.id if public else "",
            seed.cloud.hosts,
            seed.cloud.has_guests,
            UNIFIED[0] in seed.cloud.options,
            _shared_type(admin.block_storage) if seed.cloud.volumes else None,
            seed.cloud.home / "tiny/tiny.qcow2",
        )


def register_limits(identity: Any) -> None:
    """Keystone's defaults; Tempest looks for the service that they are of by the name that Nova has
    there."""
    service = identity.update_service(next(iter(identity.services(type="compute"))), name="nova")
    for name, most in LIMITS.items():
        identity.create_registered_limit(
            service_id=service.id, region_id="RegionOne", resource_name=name, default_limit=most
        )


def _shared_type(storage: Any) -> str:
    found = storage.find_type(SHARED, ignore_missing=True) or storage.create_type(
        name=SHARED, extra_specs={"multiattach": "<is> True"}
    )
    return str(found.name)


def _copy(admin: Any, image: Any) -> Any:
    data = admin.image.download_image(image).content
    properties = {name: value for name, value in image.properties.items() if name.startswith("hw_")}
    return admin.image.create_image(
        f"{image.name}-2",
        data=data,
        disk_format=image.disk_format,
        visibility="public",
        container_format="bare",
        **properties,
    )


# fmt: off
def options(cloud: Cloud, folder: Path, version: str, strangers: bool = False) -> dict[str, dict[str, object]]:
    """Tempest's options by section. ``version``: the least microversion that it asks for, or
    "latest"; ``strangers``: its tests would keep servers of other projects apart."""
    filters = [name for name in FILTERS if not (strangers and name == APART)]
    guests, several = cloud.has_guests, len(cloud.hosts) > 1
    return {
        "DEFAULT": {"log_dir": folder / "logs", "log_file": "tempest.log"},
        "oslo_concurrency": {"lock_path": folder / "lock"},
        "auth": {
            "use_dynamic_credentials": True, "create_isolated_networks": True,
            "admin_username": cloud.admin["username"], "admin_password": cloud.admin["password"],
            "admin_project_name": cloud.admin["project_name"], "admin_domain_name": "Default"},
        "identity": {"uri_v3": cloud.auth_url, "auth_version": "v3", "region": "RegionOne"},
        "identity-feature-enabled": {"api_v2": False},
        "service_available": {"cinder": cloud.shared_type is not None, "neutron": True, "glance": True, "nova": True,
                              "swift": False, "horizon": False},
        "enforce_scope": {"nova": True},
        "compute": {
            "image_ref": cloud.image, "image_ref_alt": cloud.second_image, "flavor_ref": cloud.flavor,
            "flavor_ref_alt": cloud.second_flavor, "fixed_network_name": "private", "build_interval": 1,
            "build_timeout": 600 if guests else 60,
            "min_compute_nodes": len(cloud.hosts), "min_microversion": version, "max_microversion": "latest",
            **({"migration_source_host": cloud.hosts[0], "migration_dest_host": cloud.hosts[1]} if several else {})},
        "placement": {"max_microversion": "latest"},
        "compute-feature-enabled": {
            "resize": True, "vnc_console": guests, "stable_rescue": True, "personality": True, "ide_bus": False,
            "hostname_fqdn_sanitization": True, "serial_console": guests, "shelve_migrate": several,
            "block_migration_for_live_migration": True, "live_migrate_back_and_forth": several,
            "unified_limits": cloud.unified, "volume_multiattach": True, "swap_volume": True,
            "attach_encrypted_volume": False, "volume_backed_live_migration": True,
            "nova_policy_roles": "admin,manager,member,reader", "scheduler_enabled_filters": ",".join(filters)},
        # Tempest waits so long for an image's state, which a server in memory may have left before
        # it looks.
        "image": {"build_interval": 1, "build_timeout": 300 if guests else 30},
        "volume": {
            "catalog_type": "block-storage", "build_interval": 1, "build_timeout": 600 if guests else 60,
            "min_microversion": "3.0", "max_microversion": f"3.{VOLUMES_UNTIL}",
            "volume_type_multiattach": cloud.shared_type or ""},
        "volume-feature-enabled": {"backup": False, "extend_attached_volume": True},
        "network": {"public_network_id": cloud.public_network, "floating_network_name": "public"},
        "network-feature-enabled": {"ipv6": False, "port_security": True, "api_extensions": "all"},
        "scenario": {"img_file": cloud.image_file},
        "validation": {
            "run_validation": guests, "image_ssh_user": "root", "image_alt_ssh_user": "root", "ssh_timeout": 300,
            "connect_timeout": 10, "ssh_shell_prologue": PROLOGUE, "ssh_key_type": "ecdsa"},
    }
# fmt: on


def write(cloud: Cloud, folder: Path, version: str, strangers: bool = False) -> Path:
    """The file; returns its path."""
    path = folder / FILE
    parser = configparser.RawConfigParser()
    for section, values in options(cloud, folder, version, strangers).items():
        if section != "DEFAULT":
            parser.add_section(section)
        for name, value in values.items():
            parser.set(section, name, str(value))
    with path.open("w") as stream:
        parser.write(stream)
    return path
