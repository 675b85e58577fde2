# SPDX-License-Identifier: Apache-2.0
"""tempest.conf for a cloud of ``./deploy/up``: access, resources and enabled features.

docs/tempest.md has the reason of each disabled feature.
"""

from __future__ import annotations

import configparser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.one_machine.seed import Seed
from deploy.one_machine.services.volume.versions import MAXIMUM as VOLUMES_UNTIL

FILE = "tempest.conf"
#: Filters of the scheduler that Tempest tests: the default filters and two others. The last ignores
#: servers of other projects.
DIFFERENT_HOST = "DifferentHostFilter"
FILTERS = (
    "ComputeFilter",
    "ComputeCapabilitiesFilter",
    "ImagePropertiesFilter",
    "ServerGroupAntiAffinityFilter",
    "ServerGroupAffinityFilter",
    "SameHostFilter",
    DIFFERENT_HOST,
)
#: Options of the cloud. With unified limits, the cloud enforces all registered limits of Keystone
#: and does not cache them.
FILTERED = (("scheduler", "enabled_filters", ", ".join(FILTERS)),)
UNIFIED = (
    ("quota", "driver", "unified"),
    ("quota", "unified_limits_resource_list", ""),
    ("quota", "unified_limits_cache_seconds", 0),
)
#: Registered limits that only the tests of limits reach.
LIMITS = {"servers": 1000, "class:VCPU": 1000, "class:MEMORY_MB": 1 << 24, "class:DISK_GB": 1 << 20}
SHARED = "shared-by-servers"
#: Tempest's default prologue sets pipefail, which the busybox shell of the tiny guest lacks.
PROLOGUE = "set -eu; PATH=$$PATH:/sbin:/usr/sbin;"


@dataclass(frozen=True)
class Cloud:
    """The facts of a cloud for tempest.conf.

    Attributes:
        auth_url: URL of Keystone.
        admin: Credentials of the admin, as in clouds.yaml.
        image, second_image: Ids of two images.
        flavor, second_flavor: Ids of two flavors.
        public_network: Id of the public network, or "".
        hosts: Names of the compute hosts.
        has_guests: True if guests boot.
        unified: True if the cloud enforces Keystone's limits.
        shared_type: Name of the type of multi-attach volumes, or None without a volume service.
        image_file: File of the image, which scenarios upload.
    """

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
    shared_type: str | None
    image_file: Path = Path()

    @classmethod
    def of(cls, seed: Seed, image_name: str = "tiny") -> Cloud:
        """Read the facts of a running cloud, and create the second image if it is missing.

        Args:
            seed: The cloud.
            image_name: Name of the first image.
        """
        admin = seed.admin
        image, public = admin.image.find_image(image_name), admin.network.find_network("public")
        second = admin.image.find_image(f"{image_name}-2") or _copy_image(admin, image)
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
            _ensure_shared_type(admin.block_storage) if seed.cloud.volumes else None,
            seed.cloud.home / "tiny/tiny.qcow2",
        )


def register_limits(identity: Any) -> None:
    """Register default limits in Keystone for the compute service.

    The service gets the name "nova", by which Tempest finds the limits.
    """
    service = identity.update_service(next(iter(identity.services(type="compute"))), name="nova")
    for name, limit in LIMITS.items():
        identity.create_registered_limit(
            service_id=service.id, region_id="RegionOne", resource_name=name, default_limit=limit
        )


def _ensure_shared_type(storage: Any) -> str:
    """Find or create the type of multi-attach volumes, and return the name."""
    volume_type = storage.find_type(SHARED, ignore_missing=True) or storage.create_type(
        name=SHARED, extra_specs={"multiattach": "<is> True"}
    )
    return str(volume_type.name)


def _copy_image(admin: Any, image: Any) -> Any:
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
def options(
    cloud: Cloud, folder: Path, version: str, without_different_host: bool = False
) -> dict[str, dict[str, object]]:
    """Return Tempest's options by section.

    Args:
        cloud: The cloud.
        folder: Folder for logs and locks.
        version: The least microversion of Tempest's requests, or "latest".
        without_different_host: True to skip the tests of DifferentHostFilter.
    """
    filters = [name for name in FILTERS if not (without_different_host and name == DIFFERENT_HOST)]
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
        # Tempest waits for a state of an image, which a server in memory may leave before Tempest
        # polls. Then Tempest waits until the timeout.
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


def write(cloud: Cloud, folder: Path, version: str, without_different_host: bool = False) -> Path:
    """Write tempest.conf and return the path. For the arguments see ``options``."""
    path = folder / FILE
    parser = configparser.RawConfigParser()
    for section, values in options(cloud, folder, version, without_different_host).items():
        if section != "DEFAULT":
            parser.add_section(section)
        for name, value in values.items():
            parser.set(section, name, str(value))
    with path.open("w") as stream:
        parser.write(stream)
    return path
