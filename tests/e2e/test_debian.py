# SPDX-License-Identifier: Apache-2.0
"""A Debian with cloud-init, as people use it: configured once from its config drive and once by the
metadata service.

Both boot at the same time. Emulated that takes minutes. Its image is made when it is first needed,
and kept in build/.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from deploy.one_machine.connectivity import KEY, PRIVATE
from deploy.packages import ROOT
from deploy.progress import run
from tests.e2e.guests import Guest, give_address, remove
from tests.e2e.live import SETTLE, Live
from tests.waiting import await_true

pytestmark = pytest.mark.slice("operations")
IMAGE, USER = "debian-12", "debian"
#: Seconds: a first boot, two at once on two emulated processors; what one that is still at it may
#: take for a login.
FIRST_BOOT, LOGIN = 600, 10
SCRIPT = '#!/bin/sh\necho "user data ran on $(hostname)" > /var/lib/told\n'
#: How cloud-init calls where it learnt what to do.
SOURCES = {
    "config drive": ("DataSourceConfigDrive", True),
    "metadata service": ("DataSourceOpenStack", False),
}


@pytest.fixture(scope="module")
def image(cloud: Live) -> str:
    """The id of the image, built and uploaded when it is not there."""
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
    rest, made = cloud.rest(), {}
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
        made[source] = Guest(cloud, server, name, give_address(cloud, server), user=USER)
    yield made
    for one in made.values():
        remove(one)
    cloud.seed.admin.image.delete_image(image)
    cloud.judge()


@pytest.mark.timeout(3 * FIRST_BOOT)  # the first of the two makes the image as well
@pytest.mark.parametrize("source", SOURCES)
def test_cloud_init_has_done_what_the_server_was_asked_for(
    debians: dict[str, Guest], source: str
) -> None:
    guest, (name, has_drive) = debians[source].await_ssh(FIRST_BOOT, LOGIN), SOURCES[source]
    await_true(
        lambda: guest.does("test -e /run/cloud-init/result.json"),
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
    known = guest.run("sudo cat /run/cloud-init/instance-data.json")
    assert guest.server in known and '"colour": "green"' in known
    assert guest.does("ls /dev/disk/by-label/config-2 2> /dev/null") == has_drive
    assert f"inet {guest.fixed()}/24" in guest.run("ip -4 addr")
    assert guest.run("cat /sys/class/net/e*/mtu").split() == [
        str(next(iter(guest.live.seed.demo.network.networks(name=PRIVATE))).mtu)
    ]
