# SPDX-License-Identifier: Apache-2.0
"""What the doctor finds of the volumes of servers: in the records, at the service, in guests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from common.store import schema
from deploy.operator import doctor
from tests.workflows import volumes as volume_service
from tests.workflows.frozen import register
from tests.workflows.simulator import Cloud
from tests.workflows.test_volumes import attached


@pytest.fixture
def server(cloud: Cloud) -> str:
    register(cloud)
    [server] = cloud.create(host="h1")
    cloud.settle()
    return server


def kinds(cloud: Cloud) -> list[str]:
    return [one.kind for one in cloud.findings()]


def change(cloud: Cloud, **values: Any) -> None:
    """Something that no action does."""
    cloud.store.write(lambda tx: tx.execute(sa.update(schema.block_devices).values(**values)))


def test_doctor_finds_an_attachment_that_is_gone(cloud: Cloud, server: str) -> None:
    volume = attached(cloud, server)
    cloud.volumes.state.held.clear()
    assert kinds(cloud) == ["volume-without-attachment"]
    volume_service.detach(cloud, server, volume)
    cloud.settle()
    assert kinds(cloud) == []


def test_doctor_finds_an_attachment_that_is_not_complete(cloud: Cloud, server: str) -> None:
    attached(cloud, server)
    [held] = cloud.volumes.state.held.values()
    held.attachment = replace(held.attachment, status="attaching")
    assert kinds(cloud) == ["attachment-incomplete"]


@pytest.mark.parametrize("gone", [False, True])
def test_doctor_finds_an_attachment_that_nobody_knows(
    cloud: Cloud, server: str, gone: bool
) -> None:
    made = cloud.volumes.attach(cloud.volumes.make(), server)
    if gone:
        cloud.ask(server, "delete")
        cloud.settle()
    [finding] = cloud.findings()
    assert (finding.kind, finding.subject) == ("attachment-of-server", made.id)
    assert ("is gone" in finding.text) == gone


def test_doctor_leaves_other_services_attachments_alone(cloud: Cloud, server: str) -> None:
    cloud.volumes.attach(cloud.volumes.make(), "99999999-9999-4999-8999-999999999999")
    assert kinds(cloud) == []


def test_doctor_tells_what_needs_the_service(cloud: Cloud, server: str) -> None:
    attached(cloud, server)
    [one] = cloud.store.read(lambda tx: doctor.compare_catalogue({"volume"}, tx))
    assert one.subject == "block storage service" and f"server {server} has volumes" in one.text


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"status": "attaching"}, "volume-elsewhere"),
        ({"status": "error"}, "volume-in-error"),
        ({"connection": None}, "volume-elsewhere"),
    ],
)
def test_doctor_finds_a_row_that_no_action_left(
    cloud: Cloud, server: str, values: dict[str, Any], kind: str
) -> None:
    attached(cloud, server)
    change(cloud, **values)
    assert kinds(cloud) == [kind]


def test_the_doctor_compares_what_guests_run_with(cloud: Cloud, server: str) -> None:
    volume = attached(cloud, server)
    guest = cloud.hosts["h1"].driver.host.guests[server]
    had, guest.volumes = guest.volumes, []
    assert [(one.kind, one.facts) for one in cloud.findings()] == [
        ("volume-not-in-guest", (volume,))
    ]
    guest.volumes = [*had, replace(had[0], volume_id=cloud.volumes.make())]
    assert [one.kind for one in cloud.findings()] == ["volume-of-another"]
    cloud.ask(server, "os-stop")  # what an action has is not judged, nor what is off
    assert cloud.findings() == []
    cloud.settle()
    assert cloud.findings() == []
