# SPDX-License-Identifier: Apache-2.0
"""Tests of the doctor's findings about volumes: in the records, at the service, and in guests."""

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
from tests.workflows.test_volumes import attach_new_volume


@pytest.fixture
def server(cloud: Cloud) -> str:
    register(cloud)
    [server] = cloud.create(host="h1")
    cloud.settle()
    return server


def read_finding_kinds(cloud: Cloud) -> list[str]:
    return [finding.kind for finding in cloud.findings()]


def change(cloud: Cloud, **values: Any) -> None:
    """Change all block device records, as only a defect would."""
    cloud.store.write(lambda tx: tx.execute(sa.update(schema.block_devices).values(**values)))


def test_doctor_finds_volume_without_attachment_at_service(cloud: Cloud, server: str) -> None:
    volume = attach_new_volume(cloud, server)
    cloud.volumes.state.held.clear()
    assert read_finding_kinds(cloud) == ["volume-without-attachment"]
    volume_service.detach(cloud, server, volume)
    cloud.settle()
    assert read_finding_kinds(cloud) == []


def test_doctor_finds_attachment_still_attaching_without_action(cloud: Cloud, server: str) -> None:
    attach_new_volume(cloud, server)
    [held] = cloud.volumes.state.held.values()
    held.attachment = replace(held.attachment, status="attaching")
    assert read_finding_kinds(cloud) == ["attachment-incomplete"]


@pytest.mark.parametrize("deleted", [False, True])
def test_doctor_finds_attachment_at_volume_service_without_record(
    cloud: Cloud, server: str, deleted: bool
) -> None:
    attachment = cloud.volumes.attach(cloud.volumes.make(), server)
    if deleted:
        cloud.ask(server, "delete")
        cloud.settle()
    [finding] = cloud.findings()
    assert (finding.kind, finding.subject) == ("attachment-of-server", attachment.id)
    assert ("is gone" in finding.text) == deleted


def test_doctor_ignores_attachments_of_other_clouds(cloud: Cloud, server: str) -> None:
    cloud.volumes.attach(cloud.volumes.make(), "99999999-9999-4999-8999-999999999999")
    assert read_finding_kinds(cloud) == []


def test_doctor_reports_missing_block_storage_service_with_its_users(
    cloud: Cloud, server: str
) -> None:
    attach_new_volume(cloud, server)
    [finding] = cloud.store.read(lambda tx: doctor.compare_catalogue({"volume"}, tx))
    assert (
        finding.subject == "block storage service"
        and f"server {server} has volumes" in finding.text
    )


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"status": "attaching"}, "volume-elsewhere"),
        ({"status": "error"}, "volume-in-error"),
        ({"connection": None}, "volume-elsewhere"),
    ],
)
def test_doctor_finds_block_device_in_invalid_state_without_action(
    cloud: Cloud, server: str, values: dict[str, Any], kind: str
) -> None:
    attach_new_volume(cloud, server)
    change(cloud, **values)
    assert read_finding_kinds(cloud) == [kind]


def test_doctor_finds_missing_and_foreign_volumes_of_running_guest(
    cloud: Cloud, server: str
) -> None:
    volume = attach_new_volume(cloud, server)
    guest = cloud.hosts["h1"].driver.host.guests[server]
    volumes, guest.volumes = guest.volumes, []
    assert [(finding.kind, finding.facts) for finding in cloud.findings()] == [
        ("volume-not-in-guest", (volume,))
    ]
    guest.volumes = [*volumes, replace(volumes[0], volume_id=cloud.volumes.make())]
    assert [finding.kind for finding in cloud.findings()] == ["volume-of-another"]
    cloud.ask(server, "os-stop")  # Busy servers and stopped guests are not checked.
    assert cloud.findings() == []
    cloud.settle()
    assert cloud.findings() == []
