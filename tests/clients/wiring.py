# SPDX-License-Identifier: Apache-2.0
"""What the clients' suites expect of a cloud, since they were written for DevStack: names of
flavors, images, users and clouds. All of it is made through the public APIs.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from common.security import private_files
from deploy.one_machine.seed import IMAGE, Seed

#: DevStack's. name: id, MiB, GiB, VCPUs
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


def furnish(seed: Seed, folder: Path) -> None:
    """Make what is named, and clouds.yaml in the folder that the suites run in."""
    admin = seed.admin
    for flavor in list(admin.compute.flavors()):
        admin.compute.delete_flavor(flavor)
    for name, (known, ram, disk, vcpus) in FLAVORS.items():
        admin.compute.create_flavor(name=name, id=known, ram=ram, disk=disk, vcpus=vcpus)
    _image(admin)
    admin.compute.update_quota_set(admin.session.get_project_id(), **NO_LIMIT)
    password = secrets.token_hex(16)
    project = admin.identity.create_project(name=OTHER, domain_id="default")
    user = admin.identity.create_user(
        name=OTHER, domain_id="default", password=password, default_project_id=project.id
    )
    admin.identity.assign_project_role_to_user(project, user, admin.identity.find_role("member"))
    private_files.replace(folder / "clouds.yaml", json.dumps({"clouds": _clouds(seed, password)}))


def occupy(seed: Seed) -> None:
    """A server of the admin's project: openstacksdk cannot read the usage of a project that has
    none."""
    admin = seed.admin
    server = admin.compute.create_server(
        name="resident",
        flavor_id="c1",
        networks="none",
        image_id=admin.image.find_image(IMAGE_NAME).id,
    )
    admin.compute.wait_for_server(server, interval=0.5)


def _image(admin: Any) -> None:
    """The tiny one, by a name as CirrOS has: the suites look for that."""
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

    def of(project: str) -> dict[str, str]:
        return {"project_name": project, "project_domain_id": "default"}

    admin = cloud.password("admin")
    return {
        "devstack": entry("demo", cloud.password("demo"), **of("demo")),
        "devstack-alt": entry(OTHER, password, **of(OTHER)),
        "devstack-admin": entry("admin", admin, **of("admin")),
        "functional_admin": entry("admin", admin, **of("admin")),
        "devstack-system-admin": entry("admin", admin, system_scope="all"),
    }
