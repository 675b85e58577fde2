# SPDX-License-Identifier: Apache-2.0
"""A real guest: it boots, says who it is, powers itself off, and leaves nothing when it is
deleted."""

from __future__ import annotations

import base64
from datetime import datetime

import pytest

from compute_agent.virt.libvirt.xml.domain_xml import domain_name
from tests.e2e.live import Live, Rest
from tests.waiting import await_true

TALKS = '#!/bin/sh\necho "kilonova tiny guest: six times seven is $((6 * 7)) on $(hostname)"\n'
ENDS = "#!/bin/sh\npoweroff -f\n"
#: A guest that ends by itself is seen within this time, seconds.
NOTICED = 10
#: How a line ends that libvirt writes then.
ENDED = ": shutting down, reason=shutdown"


def encoded(script: str) -> str:
    return base64.b64encode(script.encode()).decode()


def noticed(cloud: Live, server: str) -> float:
    """Seconds from libvirt's own note that the guest has ended to the record of it."""
    log = (cloud.cloud.libvirt_folder(1) / f"log/qemu/{domain_name(server)}.log").read_text(
        errors="replace"
    )
    *_, last = [line for line in log.splitlines() if line.endswith(ENDED)]
    ended = datetime.strptime(last.removesuffix(ENDED), "%Y-%m-%d %H:%M:%S.%f%z")
    [(recorded,)] = cloud.rows("SELECT updated_at FROM servers WHERE id = ?", server)
    return float(recorded / 1e6 - ended.timestamp())


def test_guest_speaks_runs_its_user_data_and_leaves_nothing(cloud: Live, demo: Rest) -> None:
    server = demo.create(
        name="Talks <&> 1",
        image=cloud.image(),
        flavor=cloud.flavor(),
        config_drive=True,
        user_data=encoded(TALKS),
    )
    found = demo.await_status(server, "ACTIVE")
    assert found["OS-EXT-STS:power_state"] == 1
    console = demo.await_ready(server)
    assert "kilonova tiny guest: booting" in console
    assert f"kilonova tiny guest: id {server}" in console
    assert "kilonova tiny guest: name Talks <&> 1" in console
    assert f"six times seven is 42 on {found['OS-EXT-SRV-ATTR:hostname']}" in console
    assert server in cloud.domains()
    assert cloud.domain_state(server) == "running"
    assert cloud.remains(server) != []  # what is looked for below can be found

    assert demo.call("DELETE", f"/servers/{server}").status == 204
    demo.await_gone(server)
    cloud.await_nothing_of(server, 10)
    cloud.judge()


@pytest.mark.slice("guests")
def test_guest_whose_power_button_is_pressed_becomes_shutoff_and_starts_again(
    cloud: Live, demo: Rest
) -> None:
    server = demo.create(image=cloud.image(), flavor=cloud.flavor())
    demo.await_status(server, "ACTIVE")
    demo.await_ready(server)
    cloud.virsh("shutdown", server)
    await_true(
        lambda: cloud.domain_state(server) == "shut off", 30, lambda: cloud.domain_state(server)
    )
    assert demo.await_status(server, "SHUTOFF")["OS-EXT-STS:power_state"] == 4
    assert 0 < noticed(cloud, server) < NOTICED
    assert demo.call("POST", f"/servers/{server}/action", {"os-start": None}).status == 202
    demo.await_status(server, "ACTIVE")
    demo.await_ready(server, times=2)


def test_guest_that_powers_itself_off_becomes_shutoff(cloud: Live, demo: Rest) -> None:
    server = demo.create(
        image=cloud.image(), flavor=cloud.flavor(), config_drive=True, user_data=encoded(ENDS)
    )
    await_true(lambda: cloud.domain_state(server) == "running", 60, lambda: demo.server(server))
    # An emulated guest boots first, which takes a minute beside other work.
    await_true(
        lambda: cloud.domain_state(server) == "shut off", 240, lambda: cloud.domain_state(server)
    )
    demo.await_status(server, "SHUTOFF")
    assert 0 < noticed(cloud, server) < NOTICED
