# SPDX-License-Identifier: Apache-2.0
"""The flavors, image, users and clouds.yaml of DevStack, which the clients' suites expect.

This module creates them through the public APIs.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from common.security import private_files
from deploy.one_machine.seed import IMAGE, Seed

#: DevStack's flavors: name -> id, MiB of memory, GiB of disk, VCPUs.
FLAVORS = {
    "m1.tiny": ("1", 512, 1, 1),
    "m1.small": ("2", 2048, 20, 1),
    "m1.medium": ("3", 4096, 40, 2),
    "m1.large": ("4", 8192, 80, 4),
    "m1.xlarge": ("5", 16384, 160, 8),
    "cirros256": ("c1", 256, 1, 1),
    "ds512M": ("d1", 512, 5, 1),
    "ds1G": ("d2", 1024, 10, 1),
    "ds2G": ("d3", 2048, 10, 2),
    "ds4G": ("d4", 4096, 20, 4),
}
IMAGE_NAME, NETWORK = "cirros-0.6.3-x86_64-disk", "private"
OTHER = "alt_demo"
NO_LIMIT = {"instances": 1000, "cores": 1000, "ram": 1 << 24}


def create_devstack_names(seed: Seed, folder: Path) -> None:
    """Create flavors, image, project and user, and write clouds.yaml.

    Args:
        seed: The cloud, whose flavors are deleted before.
        folder: Working directory of the suites, for clouds.yaml.
    """
    admin = seed.admin
    for flavor in list(admin.compute.flavors()):
        admin.compute.delete_flavor(flavor)
    for name, (flavor_id, ram, disk, vcpus) in FLAVORS.items():
        admin.compute.create_flavor(name=name, id=flavor_id, ram=ram, disk=disk, vcpus=vcpus)
    _create_image(admin)
    admin.compute.update_quota_set(admin.session.get_project_id(), **NO_LIMIT)
    password = secrets.token_hex(16)
    project = admin.identity.create_project(name=OTHER, domain_id="default")
    user = admin.identity.create_user(
        name=OTHER, domain_id="default", password=password, default_project_id=project.id
    )
    admin.identity.assign_project_role_to_user(project, user, admin.identity.find_role("member"))
    private_files.replace(folder / "clouds.yaml", json.dumps({"clouds": _clouds(seed, password)}))


def create_server(seed: Seed) -> None:
    """Create a server in the admin's project.

    Why: openstacksdk cannot read the usage of a project without servers.
    """
    admin = seed.admin
    server = admin.compute.create_server(
        name="resident",
        flavor_id="c1",
        networks="none",
        image_id=admin.image.find_image(IMAGE_NAME).id,
    )
    admin.compute.wait_for_server(server, interval=0.5)


def _create_image(admin: Any) -> None:
    """Copy the tiny image with a name like CirrOS, for which the suites search."""
    image = admin.image.find_image(IMAGE)
    properties = {name: value for name, value in image.properties.items() if name.startswith("hw_")}
    admin.image.create_image(
        IMAGE_NAME,
        data=admin.image.download_image(image).content,
        visibility="public",
        disk_format=image.disk_format,
        container_format="bare",
        **properties,
    )


def _clouds(seed: Seed, password: str) -> dict[str, Any]:
    cloud = seed.cloud

    def entry(user: str, secret: str, **scope: str) -> dict[str, Any]:
        auth = {
            "auth_url": cloud.identity_url,
            "username": user,
            "password": secret,
            "user_domain_id": "default",
            **scope,
        }
        return {"auth": auth, "region_name": "RegionOne", "identity_api_version": "3"}

    def in_project(project: str) -> dict[str, str]:
        return {"project_name": project, "project_domain_id": "default"}

    admin = cloud.password("admin")
    return {
        "devstack": entry("demo", cloud.password("demo"), **in_project("demo")),
        "devstack-alt": entry(OTHER, password, **in_project(OTHER)),
        "devstack-admin": entry("admin", admin, **in_project("admin")),
        "functional_admin": entry("admin", admin, **in_project("admin")),
        "devstack-system-admin": entry("admin", admin, system_scope="all"),
    }
