# SPDX-License-Identifier: Apache-2.0
"""Debian guests with cloud-init, one with a config drive and the other with the metadata service.

Both boot at the same time, which takes minutes with emulation. The image is built on first use and
kept in build/.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from deploy.one_machine.connectivity import KEY, PRIVATE
from deploy.packages import ROOT
from deploy.progress import run
from tests.e2e.guests import Guest, give_address
from tests.e2e.live import SETTLE, Live
from tests.waiting import await_true

pytestmark = pytest.mark.slice("operations")
IMAGE, USER = "debian-12", "debian"
#: Seconds for a first boot of both guests on two emulated processors, and for a login meanwhile.
FIRST_BOOT, LOGIN = 1500, 10
SCRIPT = '#!/bin/sh\necho "user data ran on $(hostname)" > /var/lib/told\n'
#: Source of metadata -> cloud-init's name, and whether the guest has a config drive.
SOURCES = {
    "config drive": ("DataSourceConfigDrive", True),
    "metadata service": ("DataSourceOpenStack", False),
}


@pytest.fixture(scope="module")
def image(cloud: Live) -> str:
    """Return the id of the Debian image, which is built if needed, and uploaded."""
    path = ROOT / "build/debian/debian.qcow2"
    run(
        [ROOT / "deploy/images/debian/build", path],
        "Install the packages named at the top of that file.",
    )
    return str(
        cloud.seed.admin.image.create_image(
            IMAGE,
            filename=str(path),
            disk_format="qcow2",
            container_format="bare",
            visibility="public",
            wait=True,
            min_disk=1,
            min_ram=256,
        ).id
    )


@pytest.fixture(scope="module")
def debians(cloud: Live, image: str) -> Iterator[dict[str, Guest]]:
    rest, guests = cloud.rest(), {}
    network = next(iter(cloud.seed.demo.network.networks(name=PRIVATE)))
    for source, (_, drive) in SOURCES.items():
        name = f"debian-{source.split()[0]}"
        server = rest.create(
            name=name,
            image=image,
            flavor=cloud.flavor("m1.tiny"),
            config_drive=drive,
            key_name=KEY,
            networks=[{"uuid": network.id}],
            metadata={"colour": "green"},
            user_data=base64.b64encode(SCRIPT.encode()).decode(),
        )
        rest.await_status(server, "ACTIVE", SETTLE)
        guests[source] = Guest(cloud, server, name, give_address(cloud, server), user=USER)
    yield guests
    for guest in guests.values():
        guest.remove()
    cloud.seed.admin.image.delete_image(image)
    cloud.assert_healthy()


# The first of the two tests also builds the image.
@pytest.mark.timeout(2 * FIRST_BOOT)
@pytest.mark.parametrize("source", SOURCES)
def test_cloud_init_applies_user_data_key_metadata_and_network(
    debians: dict[str, Guest], source: str
) -> None:
    guest, (name, has_drive) = debians[source].await_ssh(FIRST_BOOT, LOGIN), SOURCES[source]
    await_true(
        lambda: guest.can_run("test -e /run/cloud-init/result.json"),
        FIRST_BOOT,
        lambda: guest.rest.console(guest.server)[-3000:],
        pause=1,
    )
    result = guest.run("cat /run/cloud-init/result.json")
    assert name in result and '"errors": []' in result
    assert guest.run("hostname").strip() == guest.name
    assert guest.run("cat /var/lib/told").strip() == f"user data ran on {guest.name}"
    assert (
        guest.run("cat .ssh/authorized_keys").strip()
        == (guest.live.home / "ssh" / f"{KEY}.pub").read_text().strip()
    )
    instance_data = guest.run("sudo cat /run/cloud-init/instance-data.json")
    assert guest.server in instance_data and '"colour": "green"' in instance_data
    assert guest.can_run("ls /dev/disk/by-label/config-2 2> /dev/null") == has_drive
    assert f"inet {guest.fixed_address()}/24" in guest.run("ip -4 addr")
    assert guest.run("cat /sys/class/net/e*/mtu").split() == [
        str(next(iter(guest.live.seed.demo.network.networks(name=PRIVATE))).mtu)
    ]
