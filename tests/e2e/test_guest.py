# SPDX-License-Identifier: Apache-2.0
"""A guest that boots, runs user data, powers off, and leaves no files after its delete."""

from __future__ import annotations

import base64
from datetime import datetime

import pytest

from compute_agent.virt.libvirt.xml.domain_xml import domain_name
from tests.e2e.live import Live, Rest
from tests.waiting import await_true

GREETING_SCRIPT = (
    '#!/bin/sh\necho "kilonova tiny guest: six times seven is $((6 * 7)) on $(hostname)"\n'
)
POWEROFF_SCRIPT = "#!/bin/sh\npoweroff -f\n"
#: Seconds within which Kilonova records that a guest has ended.
MAX_DELAY_SECONDS = 10
#: The end of libvirt's log line about an ended guest.
END_LINE = ": shutting down, reason=shutdown"


def encode(script: str) -> str:
    return base64.b64encode(script.encode()).decode()


def measure_delay_to_record(cloud: Live, server: str) -> float:
    """Return the seconds from libvirt's log line about the end of the guest to the record."""
    log = (cloud.cloud.libvirt_folder(1) / f"log/qemu/{domain_name(server)}.log").read_text(
        errors="replace"
    )
    *_, last = [line for line in log.splitlines() if line.endswith(END_LINE)]
    ended = datetime.strptime(last.removesuffix(END_LINE), "%Y-%m-%d %H:%M:%S.%f%z")
    [(recorded,)] = cloud.rows("SELECT updated_at FROM servers WHERE id = ?", server)
    return float(recorded / 1e6 - ended.timestamp())


def test_guest_boots_runs_user_data_and_leaves_no_files_after_delete(
    cloud: Live, demo: Rest
) -> None:
    server = demo.create(
        name="Talks <&> 1",
        image=cloud.image(),
        flavor=cloud.flavor(),
        config_drive=True,
        user_data=encode(GREETING_SCRIPT),
    )
    server_record = demo.await_status(server, "ACTIVE")
    assert server_record["OS-EXT-STS:power_state"] == 1
    console = demo.await_ready(server)
    assert "kilonova tiny guest: booting" in console
    assert f"kilonova tiny guest: id {server}" in console
    assert "kilonova tiny guest: name Talks <&> 1" in console
    assert f"six times seven is 42 on {server_record['OS-EXT-SRV-ATTR:hostname']}" in console
    assert server in cloud.domains()
    assert cloud.domain_state(server) == "running"
    # The check after the delete would find these files.
    assert cloud.leftovers(server) != []

    assert demo.call("DELETE", f"/servers/{server}").status == 204
    demo.await_gone(server)
    cloud.await_removed(server, 10)
    cloud.assert_healthy()


@pytest.mark.slice("guests")
def test_guest_with_pressed_power_button_becomes_shutoff_and_starts_again(
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
    assert 0 < measure_delay_to_record(cloud, server) < MAX_DELAY_SECONDS
    assert demo.call("POST", f"/servers/{server}/action", {"os-start": None}).status == 202
    demo.await_status(server, "ACTIVE")
    demo.await_ready(server, times=2)


def test_guest_powering_itself_off_becomes_shutoff(cloud: Live, demo: Rest) -> None:
    server = demo.create(
        image=cloud.image(),
        flavor=cloud.flavor(),
        config_drive=True,
        user_data=encode(POWEROFF_SCRIPT),
    )
    await_true(lambda: cloud.domain_state(server) == "running", 60, lambda: demo.server(server))
    # An emulated guest boots first, which takes a minute beside other work.
    await_true(
        lambda: cloud.domain_state(server) == "shut off", 240, lambda: cloud.domain_state(server)
    )
    demo.await_status(server, "SHUTOFF")
    assert 0 < measure_delay_to_record(cloud, server) < MAX_DELAY_SECONDS
